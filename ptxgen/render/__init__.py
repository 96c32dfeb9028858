"""From a spec to PTX text: templates, their environment, the frame around a body."""
