"""How GGUF types store weights, and the layouts that kernels read."""
