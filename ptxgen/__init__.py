"""PTX generation: kernel specs, rendering, targets, lint and offline assembly.

The stub beside this file lists the public names; the documented parts of their modules are public
too. Everything else is private. Names are imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
