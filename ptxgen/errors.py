"""The one error base of ptxgen."""


class PtxgenError(Exception):
    """A kernel cannot be specialised, rendered, checked or assembled as asked."""


class SettingError(PtxgenError):
    """A setting names nothing that there is (a kernel, field, target, GPU, form), has a value that
    is not of its type, or does not go with another one."""
