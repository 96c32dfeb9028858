"""Several tokens a step: drafts, the rows that verify them, and how many are accepted."""
