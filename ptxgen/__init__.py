"""PTX generation: kernel specs, rendering, targets, lint and offline assembly.

The names in the stub beside this file are the promise, with what the modules among them document;
everything else is private. Names are imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
