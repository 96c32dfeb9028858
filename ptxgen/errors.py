"""The one error base of ptxgen."""


class PtxgenError(Exception):
    """A kernel cannot be specialised, rendered, checked or assembled as asked."""
