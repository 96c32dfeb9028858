"""Owners of device memory."""
