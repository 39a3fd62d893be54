"""Parallel training on torch.distributed's public interface alone: each claim can be re-measured on another backend."""
