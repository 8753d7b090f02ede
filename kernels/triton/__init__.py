"""Triton kernels for NVIDIA GPUs. Each module holds the kernels of one operation and the functions that launch them."""
