"""Kernels of attention, and the layout of the cache that they share."""
