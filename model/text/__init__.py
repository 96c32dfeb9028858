"""Text processing: tokenisers, chat templates, answers, constraints."""
