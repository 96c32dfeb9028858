"""The error of all requests after the device is lost."""

from urdir.driver.errors import DriverError


class DeviceLostError(DriverError):
    """A kernel faulted, the GPU failed, or weights could not be read within a step: nothing can run
    on it until the model is opened again."""
