"""`urdir ptx new`: a package with a kernel that works, to begin a new one with."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from pathlib import Path

from urdir.model.commands import options
from urdir.model.errors import ModelError

EXAMPLES = """\
  urdir ptx new my_kernel                        spec, template and test, in the folder my_kernel
  cd my_kernel && pytest                         emulator, sanitizer, assembler, GPU if any
  cd my_kernel && urdir ptx explain my_kernel.kernel:MyKernel
"""

#: The kernel of the package that is copied.
_MODEL = "scaled_sum"
#: Its parameters. An entry of the same name makes nvJitLink 13.0 crash.
_PARAMS = ("x", "y", "scale")


def add_parser(commands: options.Subparsers) -> None:
    """Declare the subcommand."""
    parser = options.add_command(
        commands, "new", run, "write the files of a new kernel: spec, template, test", EXAMPLES
    )
    parser.add_argument("name", metavar="NAME", help="lower case letters, digits and _")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="the new folder (default: NAME)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the files and print their paths."""
    _check_name(args.name)
    folder = args.output or Path(args.name)
    if folder.exists():
        raise options.UsageError(f"new: {folder} exists: choose another folder with -o")
    for path in write(args.name, folder):
        print(path)
    return 0


def write(name: str, folder: Path) -> list[Path]:
    """Copy the package ``model/data/new_kernel`` to ``folder`` under another name."""
    import urdir.model.data

    source = Path(urdir.model.data.__file__).parent / "new_kernel"
    written = []
    for file in sorted(source.rglob("*")):
        if file.is_dir() or "__pycache__" in file.parts:
            continue
        path = folder / _renamed(file.relative_to(source).as_posix(), name)
        text = _renamed(file.read_text(encoding="utf-8"), name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as exc:
            raise ModelError(f"new: {path}: cannot be written: {exc.strerror}") from exc
        written.append(path)
    return written


def class_name(name: str) -> str:
    """The spec's class: my_kernel -> MyKernel."""
    return "".join(part.capitalize() for part in name.split("_"))


def _renamed(text: str, name: str) -> str:
    dashed = name.replace("_", "-")
    for old, new in (
        (_MODEL, name),
        (class_name(_MODEL), class_name(name)),
        (_MODEL.replace("_", "-"), dashed),
    ):
        text = text.replace(old, new)
    return text


def _check_name(name: str) -> None:
    """Refuse names that Python, a kernel or another module forbids."""
    from urdir.ptxgen.catalog import kernels

    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise options.UsageError(f"new: {name!r} is not a name like my_kernel")
    if name in _PARAMS:
        raise options.UsageError(f"new: {name!r} is a parameter's name: choose another one")
    if name in kernels():
        raise options.UsageError(f"new: there is a kernel {name!r} already (urdir ptx list {name})")
    if importlib.util.find_spec(name) is not None:
        raise options.UsageError(f"new: Python has a module {name!r} already: choose another name")
