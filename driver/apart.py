"""PTX that the driver compiles while it loads a module, compiled by another process beforehand.

Launches of a process wait while one of its threads has the driver compile so (518 ms of a kernel
on an H200, 2026-11-28; 2 ms while another process compiles), and so would every answer of a
service. The driver keeps what it has compiled on disk (``CUDA_CACHE_PATH``), for every process, by
the text: loading takes milliseconds then.

    python -m urdir.driver.apart ORDINAL < JSON list of [entry, PTX text]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from urdir.driver import bindings
from urdir.driver.errors import DriverError, check

#: Seconds in which the process starts, and in which it compiles a kernel, at most.
_START, _EACH = 20.0, 5.0


def compile_apart(ordinal: int, texts: Sequence[tuple[str, str]]) -> bool:
    """Compile entries with their PTX texts for the GPU ``ordinal``; whether that succeeded.

    Failure costs time alone: it is compiled when it is loaded. The process takes as much memory of
    the GPU as a context does (0.5 GB of an H200), for as long as it runs.
    """
    command = [sys.executable, "-P", "-m", __name__, str(ordinal)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(
            command,
            input=json.dumps(texts),
            env=environment,
            text=True,
            capture_output=True,
            timeout=_START + _EACH * len(texts),
            check=False,
        )
        return not ended.returncode
    return False


def compile_here(api: Any, ordinal: int, texts: Sequence[tuple[str, str]]) -> None:
    """Load each text and find its entry, as `LoadedKernel` does. Raises CudaError."""
    check(api, api.cuInit(0), "cuInit")
    gpu = check(api, api.cuDeviceGet(ordinal), f"cuDeviceGet {ordinal}")
    context = check(api, api.cuDevicePrimaryCtxRetain(gpu), "cuDevicePrimaryCtxRetain")
    try:
        check(api, api.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        for entry, text in texts:
            module = check(api, api.cuModuleLoadData(text.encode() + b"\0"), "cuModuleLoadData")
            function = check(api, api.cuModuleGetFunction(module, entry.encode()), entry)
            registers = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
            check(api, api.cuFuncGetAttribute(registers, function), "cuFuncGetAttribute")
            check(api, api.cuModuleUnload(module), "cuModuleUnload")
    finally:
        api.cuDevicePrimaryCtxRelease(gpu)


if __name__ == "__main__":
    try:
        compile_here(bindings.real(), int(sys.argv[1]), json.load(sys.stdin))
    except DriverError as error:
        sys.exit(f"{error}")
