"""What a product goes through after its main loop."""
