"""Environment variables: the one place that reads them, and the table of what they mean.

Only commands ask for them; libraries take arguments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from urdir.model.cache_folder import user_cache_folder

#: Variable -> meaning; `urdir env` prints it. A variable only sets a default, an argument wins.
VARIABLES = {
    "URDIR_DEVICE": "default of --device (auto, cuda[:i], emulator[:sm_NN])",
    "URDIR_CACHE_DIR": "folder of compiled kernels and of the history of chat; empty: none kept",
    "URDIR_PTX_OVERRIDE": "folder of edited PTX, used where a file's name is a module key",
    "URDIR_DUMP": "folder that gets the PTX and the machine code of every kernel that is loaded",
    "CORRECTNESS_MODE": "1: download logits and choose tokens on the host",
    "DECODE_TIMING": "1: time by phase of every step on stderr",
    "GPU_DEBUG": "1: summaries of the tensors of every layer on stderr",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment asks for."""

    device: str
    cache_dir: Path | None
    ptx_override: Path | None
    ptx_dump: Path | None
    correctness_mode: bool
    decode_timing: bool
    gpu_debug: bool


def read_environment() -> Environment:
    """What the environment asks for now."""
    return Environment(
        device=os.environ.get("URDIR_DEVICE") or "auto",
        cache_dir=_cache_dir(),
        ptx_override=_folder("URDIR_PTX_OVERRIDE"),
        ptx_dump=_folder("URDIR_DUMP"),
        correctness_mode=_is_on("CORRECTNESS_MODE"),
        decode_timing=_is_on("DECODE_TIMING"),
        gpu_debug=_is_on("GPU_DEBUG"),
    )


def variables() -> dict[str, str | None]:
    """Variable -> its value, None where it is not set."""
    return {name: os.environ.get(name) for name in VARIABLES}


def flag_variables() -> Mapping[str, str]:
    """Variables that stand for flags (`urdir.model.commands.variables`), with their values."""
    kinds = ("LLAMA_ARG_", "LLAMA_API_KEY", "URDIR_ARG_", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return {name: value for name, value in os.environ.items() if name.startswith(kinds)}


def _cache_dir() -> Path | None:
    """The user's cache folder where no other one is named; None where an empty one is."""
    if "URDIR_CACHE_DIR" not in os.environ:
        return user_cache_folder()
    return _folder("URDIR_CACHE_DIR")


def _folder(variable: str) -> Path | None:
    """The path that a variable holds, None where it is empty or not set."""
    value = os.environ.get(variable)
    return Path(value) if value else None


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "off", "disabled")
