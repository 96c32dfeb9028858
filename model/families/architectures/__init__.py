"""Architectures: one file for each group of related ones, from GGUF metadata to a description.

A module lists its architectures in ``ARCHITECTURES``, keyed by the name that GGUF files use. The
registry finds every module in this folder (`registry`).
"""
