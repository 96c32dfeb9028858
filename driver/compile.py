"""PTX compilation by the driver's linker, with detailed errors."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from urdir.driver.errors import CudaError, OutOfMemoryError, PtxLoadError, check, error_of
from urdir.driver.private_folder import PrivateFolder
from urdir.ptxgen.ptx.excerpt import excerpt

_LOG_BYTES = 1 << 16

#: Errors caused by the PTX text; others, such as out of memory, are not.
_REFUSALS = ("CUDA_ERROR_INVALID_PTX", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

# PTX ISA version -> first driver line that supports it ("PTX ISA", release notes); the minimum
# driver supports at least 9.0.
_DRIVER_FOR_PTX: Mapping[str, int] = {"9.1": 590, "9.2": 595}


def image_of(api: Any, ptx: str, name: str) -> bytes:
    """What the driver loads a kernel from: a cubin, as `compile_ptx` makes it, or the PTX text
    itself where warpgroups hand registers to each other.

    The linker ignores ``setmaxnreg``, "to maintain compatibility across compilation units" (advice
    C7504). A module that is loaded from PTX is a whole program; the driver compiles it then, and
    keeps the result in its own cache. Raises as `compile_ptx` does.
    """
    return ptx.encode() + b"\0" if is_whole(ptx) else compile_ptx(api, ptx, name)


def is_whole(ptx: str) -> bool:
    """Whether a PTX text is only obeyed when a module is loaded from it."""
    return "setmaxnreg" in ptx


def compile_ptx(api: Any, ptx: str, name: str) -> bytes:
    """PTX text to a cubin for the current context's GPU, by the driver's linker.

    Raises PtxLoadError with the compiler's log and the PTX lines that it names, and
    OutOfMemoryError; ``name`` (the kernel's) is for the message.
    """
    option = api.CUjit_option
    info, errors = bytearray(_LOG_BYTES), bytearray(_LOG_BYTES)
    options = {
        option.CU_JIT_INFO_LOG_BUFFER: info,
        option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: len(info),
        option.CU_JIT_ERROR_LOG_BUFFER: errors,
        option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: len(errors),
        option.CU_JIT_LOG_VERBOSE: 1,
    }
    result = api.cuLinkCreate(len(options), list(options), list(options.values()))
    state = check(api, result, f"cuLinkCreate for kernel {name}")
    try:
        source = ptx.encode() + b"\0"
        kind = api.CUjitInputType.CU_JIT_INPUT_PTX
        label = f"{name}.ptx".encode()
        status = api.cuLinkAddData(state, kind, source, len(source), label, 0, [], [])[0]
        if not int(status):
            status, address, size = api.cuLinkComplete(state)
        if int(status):
            error = error_of(api, status, f"compiling kernel {name}")
            if isinstance(error, OutOfMemoryError):
                raise error
            raise _load_error(error, ptx, name, errors)
        cubin = ctypes.string_at(int(address), int(size))
    finally:
        ended = api.cuLinkDestroy(state)
    check(api, ended, f"cuLinkDestroy for kernel {name}")
    return cubin


def _load_error(error: CudaError, ptx: str, name: str, log: bytearray) -> PtxLoadError:
    """The error for PTX that does not compile: log, surrounding lines, dump."""
    text = bytes(log).split(b"\0")[0].decode(errors="replace").strip()
    parts = [f"{error}"]
    version = re.search(r"^\s*\.version\s+(\d+\.\d+)", ptx, re.MULTILINE)
    if version and (
        error.name == "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" or "nsupported .version" in text
    ):
        needed = _DRIVER_FOR_PTX.get(version[1])
        line = f"driver >= {needed}" if needed else "a newer driver"
        parts.append(f"PTX {version[1]} needs {line}: update the NVIDIA driver")
    if text:
        parts.append(text)
    parts += excerpt(ptx, text)
    dump = None
    if error.name in _REFUSALS or text:
        try:
            dump = str(_write(ptx, name))
            parts.append(f"the PTX is in {dump}")
        except OSError as exc:
            parts.append(f"the PTX could not be written to a file: {exc}")
    return PtxLoadError("\n".join(parts), text, dump)


def _write(ptx: str, name: str) -> Path:
    """Write a failing PTX text to the temporary folder, once per text; returns its path."""
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    folder = PrivateFolder(Path(tempfile.gettempdir()) / f"urdir-ptx-{user}")
    data = ptx.encode()
    file = f"{name}-{hashlib.sha256(data).hexdigest()[:16]}.ptx"
    folder.write(file, data)
    return folder.path / file
