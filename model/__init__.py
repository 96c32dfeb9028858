"""Language models from GGUF files: loading, decode plans, sampling, the command line."""
