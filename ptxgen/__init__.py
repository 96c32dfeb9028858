"""PTX generation: kernel specs, rendering, targets, lint and offline assembly."""
