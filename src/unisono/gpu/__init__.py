"""Programs on GPUs: kernels generated from a program's rows, and what they run over.

A kernel is a program's rows unrolled, as text of Triton; a block of threads is to it what a process is to the
interpreters of `runtime`: it has its own meetings and its own slots of staging memory. Triton and torch.cuda are
imported when a kernel is compiled or launched, never before.
"""
