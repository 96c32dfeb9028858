"""A kernel for urdir: sums of scaled rows."""
