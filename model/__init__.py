"""Language models from GGUF files: loading, decode plans, sampling, the command line.

The names in the stub beside this file are the promise; everything else is private. Names are
imported when first used: importing the package loads neither numpy nor libcuda.
"""

import lazy_loader

_lazy, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """A name of the stub, or the installed version."""
    if name == "__version__":
        from importlib.metadata import version

        return version("urdir")
    return _lazy(name)
