"""What a model is made of, as data."""
