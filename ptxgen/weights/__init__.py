"""Storage of weights in GGUF types, and the layouts that kernels read."""
