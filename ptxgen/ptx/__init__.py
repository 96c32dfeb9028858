"""PTX text to instructions (PTX ISA, chapters 4 and 5), their control flow, GPU architectures, and
what launches take.

Lint, statistics and the emulator use the same parser. It is the only part of ptxgen that the driver
imports, so it imports nothing outside itself. The names in the stub beside this file are imported
when first used: a GPU with cached kernels needs no parser.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
