"""What a model file is, wherever it comes from."""
