"""Sources of kernels' texts: templates, and digests of every source. Needs no Jinja."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

from urdir.ptxgen.errors import PtxgenError

#: The package of urdir's own templates.
TEMPLATES = "urdir.templates"

#: Package, and the file's path in it.
TemplateName = tuple[str, str]


def read_template(name: TemplateName) -> str:
    """The source text of a template; raises PtxgenError naming package and file."""
    package, file = name
    try:
        importlib.import_module(package)
        data = pkgutil.get_data(package, file)  # importlib.resources takes 20 ms to import
    except (ModuleNotFoundError, FileNotFoundError) as exc:
        raise PtxgenError(f"no template {file!r} in package {package!r}") from exc
    if data is None:  # a package without an __init__.py
        return _read_resource(package, file)
    return data.decode().replace("\r\n", "\n")


def _read_resource(package: str, file: str) -> str:
    from importlib import resources

    try:
        return resources.files(package).joinpath(file).read_text()
    except FileNotFoundError as exc:
        raise PtxgenError(f"no template {file!r} in package {package!r}") from exc


def named_in(package: str, name: str) -> TemplateName:
    """Resolve ``name`` in a template of ``package``.

    urdir's templates name each other by their paths. Those of other packages write
    ``package/path``, and the macro files at the top of ``urdir.templates`` without a package.
    """
    if package == TEMPLATES or "/" not in name:
        return TEMPLATES, name
    return split_name(name)


def split_name(name: str) -> TemplateName:
    """The parts of ``package/path``."""
    package, _, file = name.partition("/")
    return package, file


def macro_files(folder: str) -> list[str]:
    """The paths of all macro files that lie in a folder of urdir's templates, in order."""
    path = Path(str(importlib.import_module(TEMPLATES).__file__)).parent / folder
    return sorted(f"{folder}/{file.name}" for file in path.glob("_*.j2"))


_IMPORT = re.compile(r"""\{%-?\s*(?:import|from|include)\s+["']([^"']+)["']""")
_FOLDER = re.compile(r"""\bmacros_in\("([^"]+)"\)""")


@functools.cache
def source_digest(template: TemplateName) -> str:
    """Digest of a template and of every macro file it can import."""
    digest = hashlib.sha256()
    seen: list[TemplateName] = [template]
    for name in seen:
        source = read_template(name)
        digest.update(source.encode())
        imported = [named_in(name[0], file) for file in _IMPORT.findall(source)]
        for folder in _FOLDER.findall(source):
            imported += [(TEMPLATES, file) for file in macro_files(folder)]
        seen += [found for found in dict.fromkeys(imported) if found not in seen]
    return digest.hexdigest()


@functools.cache
def generator_digest() -> str:
    """Digest of all Python sources of ptxgen, which may affect the text of a kernel."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def module_digest(name: str) -> str:
    """Digest of a loaded module's source; of its name without a source (interactive)."""
    try:
        source = inspect.getsource(sys.modules[name])
    except OSError:
        source = name
    return hashlib.sha256(source.encode()).hexdigest()
