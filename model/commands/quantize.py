"""`urdir quantize`: write a GGUF file with other types."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from urdir.model.commands import options
from urdir.model.commands.opening import open_device
from urdir.model.commands.report import size_text

EXAMPLES = """\
  urdir quantize model-f16.gguf model-q4_k_m.gguf           llama.cpp's recipe Q4_K_M
  urdir quantize model-f16.gguf model-q6_k.gguf --type q6_k   one type
  urdir quantize folder model-q4_k_m.gguf                     for urdir alone

A GPU does the work if there is one. Metadata are copied. The file of a folder keeps its keys and
its order of rows; --quantize loads a folder in the same way without a file.
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    from urdir.model.files.wanted_types import QUANTISED

    parser = options.add_command(
        commands, "quantize", run, "write a GGUF file with matrices of other types", EXAMPLES
    )
    parser.add_argument("source", metavar="MODEL", help="a file, a folder, hf:org/repo or demo")
    parser.add_argument("out", metavar="OUT.gguf", type=Path)
    types = [name for name in QUANTISED if name != "fp8"]  # GGUF lacks it
    of_type: dict[str, Any] = {"type": str.lower, "choices": types, "metavar": "TYPE"}
    parser.add_argument(
        "named", nargs="?", **of_type, help="as llama-quantize takes it: the same as --type"
    )
    parser.add_argument("--type", **of_type, help=f"{', '.join(types)} (q4_k_m)")
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file, with a progress bar on stderr."""
    if args.named is not None and args.type is not None:
        raise options.UsageError(f"two types: {args.named} and {args.type}")
    wanted = args.named or args.type or "q4_k_m"
    from urdir.model.files.requantise import made_blocks, requantise
    from urdir.model.files.source import located
    from urdir.model.memory.device_blocks import DeviceBlocks
    from urdir.model.progress import Progress

    source, _ = located(args.source)
    files = [*source.glob("*.safetensors")] if source.is_dir() else [source]
    size = sum(file.stat().st_size for file in files if file.exists())
    with ExitStack() as owners:
        device = owners.enter_context(open_device(args))
        is_chosen = args.device is not None or not device.is_emulated
        make = owners.enter_context(DeviceBlocks(device)) if is_chosen else made_blocks
        progress = owners.enter_context(Progress("quantising", size))
        requantise(source, args.out, wanted, progress.advance, make)
    print(f"{args.out}: {size_text(args.out.stat().st_size)}, {size_text(size)} before")
    return 0
