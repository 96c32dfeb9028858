"""Jinja2 templates of PTX kernels; files with a leading underscore hold shared macros."""
