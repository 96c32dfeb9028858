"""Kernels of several devices, which write into each other's memory."""
