"""Embeddings and scores of texts: whole texts side by side in one step, without a cache."""
