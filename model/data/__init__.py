"""The demo model and its draft, chat templates, and what `urdir ptx new` copies."""
