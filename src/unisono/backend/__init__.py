"""PyTorch's view: the process group, its operations, Work and Future."""
