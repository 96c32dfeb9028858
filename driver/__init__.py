"""The CUDA driver API, real or emulated: memory, modules, streams, plans and graphs.

The stub beside this file lists the public names; the documented parts of their modules are public
too. Everything else is private. Names are imported when first used: importing the package loads
neither numpy nor libcuda.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
