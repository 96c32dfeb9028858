"""The error of all requests after the device is lost."""

from urdir.driver.errors import DriverError


class DeviceLostError(DriverError):
    """A kernel faulted or the GPU failed: nothing can run on it until the model is opened again."""
