"""The built-in kernels, found by walking this package."""
