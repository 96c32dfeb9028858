"""The built-in kernels: one module a family, found by walking this package."""
