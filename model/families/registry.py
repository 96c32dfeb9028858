"""Registry of families: from an architecture's name to the function that describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from urdir.model.errors import UnsupportedError
from urdir.model.families import architectures
from urdir.model.families.description import Description
from urdir.model.families.reader import Reader

Describe = Callable[[Reader], Description]


@cache
def families() -> Mapping[str, Describe]:
    """The describing function of each architecture, sorted by name."""
    found: dict[str, Describe] = {}
    for name in _modules():
        found |= _described_in(name)
    return dict(sorted(found.items()))


def _find(architecture: str) -> Describe | None:
    """The architecture's entry of `families`. Modules whose names it begins with come first;
    modules after the match are not imported, because importing all takes 30 ms.
    """
    for name in sorted(_modules(), key=lambda name: not architecture.startswith(name)):
        if (found := _described_in(name).get(architecture)) is not None:
            return found
    return None


@cache
def _modules() -> list[str]:
    return [module.name for module in iter_modules(architectures.__path__)]


def _described_in(name: str) -> Mapping[str, Describe]:
    module = import_module(f"{architectures.__name__}.{name}")
    found: Mapping[str, Describe] = module.ARCHITECTURES
    return found


#: Files that are no language model, by general.architecture.
_OTHER_FILES = {
    "clip": ": this is a multi-modal projector (mmproj); only text models run",
    "controlvector": ": this is a control vector; these are not supported",
    "eagle3": ": this is an EAGLE-3 draft, give it to its model as its draft",
    "dflash": ": this is a DFlash draft, give it to its model as its draft",
    "gemma4-assistant": ": this is Gemma 4's assistant, give it to its model as its draft",
}


def _hint(architecture: str) -> str:
    """The nearest supported architectures, or what kind of file it is."""
    if architecture in _OTHER_FILES:
        return _OTHER_FILES[architecture]
    near = get_close_matches(architecture, families(), 3)
    if near:
        return f"; {' and '.join(near)} {'is' if len(near) == 1 else 'are'}"
    return f" (the {len(families())} supported ones: table Architectures in model/MODELS.md)"


def describe(file: Reader) -> Description:
    """Describe a file by its family; tensors are not checked yet."""
    architecture = file.architecture
    if (described := _find(architecture)) is None:
        raise UnsupportedError(
            f"architecture {architecture!r} is not supported{_hint(architecture)}"
        )
    return described(file)
