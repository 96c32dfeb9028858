"""`urdir list`: the models on this machine."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from urdir.model.commands import options
from urdir.model.commands.report import size_text
from urdir.model.commands.table import Column, print_table
from urdir.model.commands.terminal import printable

EXAMPLES = """\
  urdir list           the demo model, and what the Hugging Face hub's cache has
  urdir list --json    the same for programs
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(commands, "list", run, "list the models that are here", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> int:
    """Print the model names that every command accepts."""
    from urdir.model.files.demo import DEMO, demo_model
    from urdir.model.files.hub import FoundModel
    from urdir.model.files.hub_cache import cached_models

    demo = demo_model()
    found = demo.stat()
    models = [FoundModel(DEMO, demo, found.st_size, found.st_mtime), *cached_models()]
    entries = [
        {
            "name": model.name,
            "bytes": model.nbytes,
            **_facts(model.path),
            "modified": time.strftime("%Y-%m-%d", time.localtime(model.modified)),
            "path": str(model.path),
        }
        for model in models
    ]
    if args.json:
        print(json.dumps(entries, indent=2))
        return 0
    columns = (
        Column("name"),
        Column("size", right=True),
        Column("type"),
        Column("architecture", rank=2),
        Column("changed", rank=1),
    )
    rows = [
        (
            printable(entry["name"]),
            size_text(entry["bytes"]),
            printable(entry["type"] or "-"),
            printable(entry["architecture"] or "-"),
            entry["modified"],
        )
        for entry in entries
    ]
    print_table(columns, rows)
    return 0


def _facts(path: Path) -> dict[str, Any]:
    """Type and architecture from the file's metadata; None if it cannot be read."""
    from urdir.model.errors import ModelError
    from urdir.model.files.file_type import file_type
    from urdir.model.files.source import open_model

    try:
        with open_model(path) as file:
            architecture = file.metadata.optional("general.architecture", str, None)
            return {"type": file_type(file), "architecture": architecture}
    except ModelError:
        return {"type": None, "architecture": None}
