"""PTX generation: kernel specs, rendering, targets, lint and offline assembly.

``__all__`` is the promise, with what the modules in it document; everything else is private.
Names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urdir.ptxgen import assemble, catalog, kernels, lint
    from urdir.ptxgen.errors import PtxgenError
    from urdir.ptxgen.formats import FORMATS, Format, format_of
    from urdir.ptxgen.layout import Layout
    from urdir.ptxgen.spec import Access, KernelSpec, LaunchShape, Param, Tolerance

__all__ = [
    "FORMATS",
    "Access",
    "Format",
    "KernelSpec",
    "LaunchShape",
    "Layout",
    "Param",
    "PtxgenError",
    "Tolerance",
    "assemble",
    "catalog",
    "format_of",
    "kernels",
    "lint",
]

#: Module -> the names of ``__all__`` that it defines; a module without any is one itself.
_MODULES: dict[str, tuple[str, ...]] = {
    "assemble": (),
    "catalog": (),
    "errors": ("PtxgenError",),
    "formats": ("FORMATS", "Format", "format_of"),
    "kernels": (),
    "layout": ("Layout",),
    "lint": (),
    "spec": ("Access", "KernelSpec", "LaunchShape", "Param", "Tolerance"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_HOME.get(name, name)}")
        return getattr(module, name) if name in _HOME else module
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
