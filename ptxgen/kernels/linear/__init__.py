"""Products of activations with weight matrices."""
