"""`urdir env`: versions, driver, device, caches: what a bug report needs."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from pathlib import Path
from typing import Any

from urdir.model.commands import options
from urdir.model.commands.report import installed_version

EXAMPLES = """\
  urdir env                  what urdir finds here
  urdir env --clear-cache    delete the compiled kernels kept on disk
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "env", run, "show versions, driver, device and caches", EXAMPLES
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--clear-cache", action="store_true", help="delete the cubin cache first")


def run(args: argparse.Namespace) -> int:
    """Probe and print; finding no GPU is an answer, not a failure."""
    from urdir.model.environment import read_environment

    environment = read_environment()
    if args.clear_cache and environment.cache_dir is not None:
        _delete(environment.cache_dir)
    report = _report(environment.cache_dir)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for section, entries in report.items():
        print(f"{section}:")
        for name, value in entries.items():
            print(f"  {name:<18} {value}")
    return 0


def _delete(folder: Path) -> None:
    from urdir.model.errors import ModelError

    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise ModelError(f"--clear-cache: {folder} cannot be deleted: {exc}") from exc


def _report(cache_dir: Path | None) -> dict[str, dict[str, Any]]:
    from urdir.driver.device import probe
    from urdir.model.environment import variables

    found = probe()
    return {
        "versions": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{
                name: installed_version(name)
                for name in ("urdir", "cuda-bindings", "numpy", "gguf")
            },
            **{
                name: installed_version(name)
                for name in ("jinja2", "tokenizers", "nvidia-nvjitlink")
            },
        },
        "device": {"status": found.status, "detail": found.detail},
        "cache": {"folder": str(cache_dir), "bytes": _folder_bytes(cache_dir)},
        "environment": variables(),
    }


def _folder_bytes(folder: Path | None) -> int:
    if folder is None:
        return 0
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # what cannot be read cannot be used as a cache either
        return 0
