"""Launches of mixtures of experts."""
