"""Checking kernels, graphs and models against references."""
