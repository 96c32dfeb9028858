"""HTTP in processes of their own, apart from the engine's: `supervisor` has the picture."""
