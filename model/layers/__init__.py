"""Layers as operations: from a description to a graph, without kernels and buffers."""
