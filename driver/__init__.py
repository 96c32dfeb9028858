"""The CUDA driver API, real or emulated: memory, modules, streams, plans and graphs.

The names in the stub beside this file are the promise, with what the modules among them document;
everything else is private. Names are imported when first used: importing the package loads neither
numpy nor libcuda.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
