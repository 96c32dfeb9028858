"""PTX tools: lint, assemble, disassemble, dump, compare, statistics."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["assemble", "lint"])
