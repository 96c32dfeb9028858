"""One file for each group of related architectures: how their metadata becomes a description.

A module lists its architectures, by the name that GGUF files use, in ``ARCHITECTURES``. A new file
here is found by itself (`registry`).
"""
