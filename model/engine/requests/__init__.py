"""Many requests at once: what is asked, which rows a step processes, and what is answered."""
