"""Attention kernels, and the layout of their KV cache."""
