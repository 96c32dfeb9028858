"""Model files and their metadata."""
