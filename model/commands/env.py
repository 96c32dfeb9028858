"""`urdir env`: versions, driver, device and caches, for bug reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from pathlib import Path
from typing import Any

from urdir.model.commands import options
from urdir.model.commands.report import installed_version
from urdir.model.commands.terminal import printable

EXAMPLES = """\
  urdir env                  what urdir finds here
  urdir env --clear-cache    delete the compiled kernels kept on disk
"""

_PACKAGES = (
    "urdir",
    "cuda-python",
    "cuda-bindings",
    "numpy",
    "gguf",
    "jinja2",
    "tokenizers",
    "prompt-toolkit",
    "nvidia-nvjitlink",
    "huggingface-hub",
)


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "env", run, "show versions, driver, device and caches", EXAMPLES
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--clear-cache", action="store_true", help="delete compiled kernels first")


def run(args: argparse.Namespace) -> int:
    """Probe and print. The lack of a GPU is a result, not a failure."""
    from urdir.model.environment import VARIABLES, read_environment

    environment = read_environment()
    if args.clear_cache and environment.cache_dir is not None:
        _clear(environment.cache_dir)
    report = _report(environment.cache_dir)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for section, entries in report.items():
        print(f"{section}:")
        for name, value in entries.items():
            if value is None:
                value = f"not set ({VARIABLES[name]})" if name in VARIABLES else "none"
            print(f"  {name:<18} {printable(value)}")
    return 0


def _clear(folder: Path) -> None:
    """Delete the compiled kernels in a folder, and no other file."""
    from urdir.driver.cache import CubinCache
    from urdir.model.errors import ModelError

    for kind in ("cuda", "emulator"):
        parts = [folder / kind / name for name in ("specs", "cubins")]
        if not all(part.is_dir() for part in parts):
            continue
        try:
            CubinCache(folder / kind).clear()
        except OSError as exc:
            raise ModelError(f"--clear-cache: {folder / kind} cannot be deleted: {exc}") from exc
        with contextlib.suppress(OSError):  # what is not ours stays, in its folder
            for part in (*parts, folder / kind):
                part.rmdir()


def _report(cache_dir: Path | None) -> dict[str, dict[str, Any]]:
    from urdir.driver.device import probe
    from urdir.model.environment import variables

    found = probe()
    return {
        "versions": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: installed_version(name) for name in _PACKAGES},
        },
        "device": {
            "status": found.status,
            "detail": found.detail,
            "cuda": ".".join(map(str, found.version)) if found.version else "none",
            "gpus": list(found.devices),
        },
        "cache": {
            "folder": None if cache_dir is None else str(cache_dir),
            "bytes": _folder_bytes(cache_dir),
        },
        "environment": variables(),
    }


def _folder_bytes(folder: Path | None) -> int:
    """Bytes of the compiled kernels in a folder."""
    if folder is None:
        return 0
    try:
        files = [path for kind in ("cuda", "emulator") for path in (folder / kind).rglob("*")]
        return sum(path.stat().st_size for path in files if path.is_file())
    except OSError:  # what cannot be read cannot be used as a cache either
        return 0
