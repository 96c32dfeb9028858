"""Errors of ptxgen, with one base class."""


class PtxgenError(Exception):
    """A kernel cannot be specialised, rendered, checked or assembled as requested."""


class SettingError(PtxgenError):
    """A setting is unknown (a kernel, field, target, GPU, form), has a value of the wrong type, or
    conflicts with another one."""
