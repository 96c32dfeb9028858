"""Kernels of layers with several streams (Gemma 3n)."""
