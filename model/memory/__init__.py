"""The owners of device memory."""
