"""Model families: architectures described as data."""
