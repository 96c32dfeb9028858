"""What the vectors of a product go through before its main loop."""
