"""What a family's table lists as ``steps``: functions for fields that are no rename."""
