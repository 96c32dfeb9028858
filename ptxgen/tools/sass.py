"""Disassembly of machine code by nvdisasm, from its wheel (``pip install 'urdir[sass]'``) or the
PATH."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from urdir.ptxgen.errors import PtxgenError

#: The package with the executable.
PACKAGE = "nvidia-cuda-nvdisasm"


class DisassemblerError(PtxgenError):
    """nvdisasm is not installed, or cannot read the cubin."""


def disassemble(cubin: bytes, *, life_ranges: bool = False) -> str:
    """SASS of a cubin; ``life_ranges`` adds columns with the live registers."""
    options = ["-c"] + (["-plr"] if life_ranges else [])
    with tempfile.TemporaryDirectory(prefix="urdir-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run([*options, str(path)])


def disassembler_version() -> str:
    """ "nvdisasm 13.0.85". Raises DisassemblerError if it is not installed."""
    found = re.search(r"V(\d[\d.]*)", _run(["--version"]))
    return f"nvdisasm {found[1] if found else '(unknown version)'}"


def find_disassembler() -> Path:
    """The executable, from the wheel or the PATH. Raises DisassemblerError."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == "nvdisasm" and (path := Path(str(file.locate()))).is_file():
            return path
    if found := shutil.which("nvdisasm"):
        return Path(found)
    raise DisassemblerError(
        "SASS needs nvdisasm, which is not installed: pip install 'urdir[sass]' "
        f"(the package {PACKAGE}), or put a CUDA toolkit's bin folder on the PATH"
    )


def _run(arguments: list[str]) -> str:
    command = [str(find_disassembler()), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise DisassemblerError(f"{command[0]} cannot be run: {exc}") from exc
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())[:300]
        raise DisassemblerError(f"nvdisasm failed ({done.returncode}): {message}")
    return done.stdout
