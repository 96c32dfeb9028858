"""Functions that append a model's launches to a plan."""
