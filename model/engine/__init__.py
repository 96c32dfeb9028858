"""Running a model: sessions, steps, sampling, generation."""
