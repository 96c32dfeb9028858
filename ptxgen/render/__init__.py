"""Rendering: templates, the Jinja environment, and the frame around a kernel's body."""
