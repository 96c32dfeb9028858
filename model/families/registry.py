"""Registry of families: from an architecture's name to the function that describes it.

Other packages announce architectures by entry points of the group ``urdir.families``, whose names
are those of the architectures, and whose values the functions::

    [project.entry-points."urdir.families"]
    mine = "my_family:mine"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module, metadata
from pkgutil import iter_modules

from urdir.model.errors import UnsupportedError
from urdir.model.families import architectures
from urdir.model.families.description import Description
from urdir.model.families.reader import Reader

Describe = Callable[[Reader], Description]

#: The entry point group for architectures of other packages.
ENTRY_POINTS = "urdir.families"


@cache
def families() -> Mapping[str, Describe]:
    """The describing function of each architecture of urdir, sorted by name."""
    found: dict[str, Describe] = {}
    for name in _modules():
        found |= _described_in(name)
    return dict(sorted(found.items()))


def _announced(architecture: str) -> Describe | None:
    """The function that another package announces. Raises UnsupportedError if it does not load."""
    for point in metadata.entry_points(group=ENTRY_POINTS, name=architecture):
        try:
            describes: Describe = point.load()
        except (ImportError, AttributeError) as exc:
            raise UnsupportedError(f"entry point {point.name} = {point.value!r}: {exc}") from exc
        return describes
    return None


def _find(architecture: str) -> Describe | None:
    """The architecture's entry of `families`, else what another package announces. Modules whose
    names it begins with come first; modules after the match are not imported, because importing
    all takes 30 ms.
    """
    for name in sorted(_modules(), key=lambda name: not architecture.startswith(name)):
        if (found := _described_in(name).get(architecture)) is not None:
            return found
    return _announced(architecture)


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
