"""`urdir pull`: download a model from the Hugging Face hub."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from urdir.model.commands import options
from urdir.model.commands.report import size_text
from urdir.model.commands.terminal import printable
from urdir.model.errors import HubNameError, SettingsError

EXAMPLES = """\
  urdir pull org/repo-GGUF            its Q4_K_M, or its only one
  urdir pull hf:org/repo-GGUF:Q8_0    that type
  urdir pull org/repo-GGUF:a/b.gguf   that file

The model lands in huggingface_hub's cache and is opened as hf:org/repo-GGUF[:TYPE] from
then on; urdir list shows what is there. HF_HOME moves the cache, HF_TOKEN opens gated repositories.
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "pull", run, "download a model from the Hugging Face hub", EXAMPLES
    )
    given = parser.add_mutually_exclusive_group(required=True)
    shown = "ORG/REPO[:TYPE]"
    given.add_argument("name", nargs="?", metavar=shown, help="the model, with or without hf:")
    given.add_argument(
        "-hf", "--hf-repo", metavar=shown, help="the same, as other commands have it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Download, or find in the cache, and print where it is."""
    from urdir.model.files.hub import PREFIX, HubName, download
    from urdir.model.files.source import ollama_hint

    given = args.hf_repo or args.name
    if Path(given).exists():
        raise SettingsError(f"{given} is on this machine already; urdir show says what it needs")
    try:
        name = HubName.parse(given.removeprefix(PREFIX))
    except HubNameError:
        if hint := ollama_hint(given):
            raise SettingsError(f"{given}: {hint}") from None
        raise
    path = download(name)
    nbytes = sum(file.stat().st_size for file in _files(path))
    if args.json:
        print(json.dumps({"path": str(path), "bytes": nbytes}))
    else:
        print(f"{printable(path)}  {size_text(nbytes)}")
    return 0


def _files(path: Path) -> list[Path]:
    from urdir.model.files.split import part_names

    if path.is_dir():
        return list(path.glob("*.safetensors"))
    return [path.with_name(name) for name in part_names(path.name)]
