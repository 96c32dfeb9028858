"""Catalog of kernels: the built-in ones, and those of other packages.

Built-in kernels are found by walking ``urdir.ptxgen.kernels``; another package adds its own by an
entry point of the group ``urdir.kernels`` that names a spec class::

    [project.entry-points."urdir.kernels"]
    my_kernel = "my_package.my_kernel:MyKernel"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from urdir.ptxgen import kernels as builtin_package
from urdir.ptxgen.errors import PtxgenError, SettingError
from urdir.ptxgen.spec import KernelSpec

#: The entry point group for spec classes of other packages.
ENTRY_POINTS = "urdir.kernels"


def kernels() -> Mapping[str, type[KernelSpec]]:
    """Every spec class by its PTX entry name, in alphabetical order.

    Raises PtxgenError if two classes share a name, and for an entry point that is not a spec class.
    """
    found: dict[str, type[KernelSpec]] = {}
    for spec in (*_builtin(), *_announced()):
        if found.setdefault(spec.name, spec) is not spec:
            raise PtxgenError(
                f"two kernels are called {spec.name!r}: {_where(found[spec.name])}, {_where(spec)}"
            )
    return MappingProxyType(dict(sorted(found.items())))


def kernel(name: str) -> type[KernelSpec]:
    """The spec class of the kernel ``name``, or the class that "package.module:Class" names, of an
    installed package or one in the current folder.

    Raises SettingError, with similar names.
    """
    if ":" in name:
        return _of_module(name)
    known = kernels()
    if name not in known:
        near = get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "urdir ptx list prints all"
        raise SettingError(f"no kernel {name!r}: {hint}")
    return known[name]


def _of_module(name: str) -> type[KernelSpec]:
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # the script `urdir` starts without it
        sys.path.append(here)  # last, so that no file there hides a module
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise SettingError(f"no kernel {name!r}: {exc}") from exc
    if not _is_kernel(value):
        raise SettingError(f"no kernel {name!r}: it is not a KernelSpec with a name and a template")
    spec: type[KernelSpec] = value
    return spec


def _builtin() -> Iterator[type[KernelSpec]]:
    prefix = builtin_package.__name__ + "."
    for info in pkgutil.walk_packages(builtin_package.__path__, prefix):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if _is_kernel(value) and value.__module__ == module.__name__:
                yield value


def _announced() -> Iterator[type[KernelSpec]]:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            value = point.load()
        except (ImportError, AttributeError) as exc:
            raise PtxgenError(f"entry point {point.name} = {point.value!r}: {exc}") from exc
        if not _is_kernel(value):
            raise PtxgenError(f"entry point {point.name} = {point.value!r} is not a kernel spec")
        yield value


def _is_kernel(value: object) -> bool:
    """Whether a class is a spec with a name and a template; bases of several kernels have none."""
    return (
        inspect.isclass(value)
        and issubclass(value, KernelSpec)
        and hasattr(value, "name")
        and hasattr(value, "template")
    )


def _where(spec: type[KernelSpec]) -> str:
    return f"{spec.__module__}.{spec.__qualname__}"
