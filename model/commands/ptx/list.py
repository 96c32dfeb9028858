"""`urdir ptx list`: every kernel and its fields, or the specialisations that a model uses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options
from urdir.model.commands.ptx import arguments
from urdir.model.commands.report import extent, fields_text, megabytes_text, roles_text
from urdir.model.commands.table import Column, print_table, wrapped

if TYPE_CHECKING:
    from urdir.ptxgen.spec import KernelSpec

EXAMPLES = """\
  urdir ptx list                               every kernel with its fields and defaults
  urdir ptx list gemm                          one of them
  urdir ptx list --json                        the same for programs
  urdir ptx list --model model.gguf            what this model's decode and prompt steps launch
  urdir ptx list --model model.gguf --gpu l4   the same on another GPU
  urdir ptx list --model model.gguf --graph    the operations of a decode step, before any kernel
"""

#: Characters of a field's name and default, where these are short.
_FIELD_WIDTH = 40
_COLUMNS = (
    Column("launches", right=True),
    Column("what"),
    Column("kernel"),
    Column("grid x block", rank=3),
    Column("MB", right=True, rank=2),
    Column("a step of", rank=1, cut=True),
    Column("fields", rank=4, cut=True),
)


def add_parser(commands: options.Subparsers) -> None:
    """Declare the subcommand."""
    parser = options.add_command(
        commands, "list", run, "list kernels, or those that a model uses", EXAMPLES
    )
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help="only this one")
    arguments.add_model(parser)
    arguments.add_all(parser)
    arguments.add_target(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument(
        "--graph", action="store_true", help="print the operations of a decode step of one row"
    )


def run(args: argparse.Namespace) -> int:
    """Print."""
    if args.model is None:
        if args.target or args.gpu or args.ctx_size or args.graph:
            raise options.UsageError("list: --target, --gpu, -c and --graph belong to --model")
        _list_kernels(args.kernel, args.json)
    elif args.kernel is not None:
        raise options.UsageError("list: give a KERNEL or --model, not both")
    elif args.graph:
        _print_graph(args)
    else:
        _list_model(args)
    return 0


def _list_kernels(name: str | None, as_json: bool) -> None:
    from urdir.ptxgen import catalog
    from urdir.ptxgen.spec import purpose_of
    from urdir.ptxgen.tools.settings import fields_of

    found: Sequence[type[KernelSpec]]
    found = [catalog.kernel(name)] if name else list(catalog.kernels().values())
    if as_json:
        print(json.dumps([_kernel_dict(kernel) for kernel in found], indent=2))
        return
    for kernel in found:
        print(wrapped(f"{kernel.name}  {purpose_of(kernel)}", 8))
        fields = [
            (f"{field.name} = {field.default}" if field.has_default else field.name, field.type)
            for field in fields_of(kernel)
        ]
        width = min(_FIELD_WIDTH, max(len(left) for left, _ in fields))
        for left, kind in fields:
            print(wrapped(f"    {left:<{width}}  {kind}", width + 6))


def _kernel_dict(kernel: type[KernelSpec]) -> dict[str, Any]:
    from urdir.ptxgen.spec import purpose_of
    from urdir.ptxgen.tools.settings import fields_of

    return {
        "kernel": kernel.name,
        "purpose": purpose_of(kernel),
        "fields": [
            {"name": f.name, "type": f.type, "example": f.example}
            | ({"default": f.default} if f.has_default else {})
            for f in fields_of(kernel)
        ],
    }


def _print_graph(args: argparse.Namespace) -> None:
    from urdir.model.families.config import Config
    from urdir.model.files.source import open_model
    from urdir.model.layers.builder import StepOps
    from urdir.model.layers.ends import embedding, head
    from urdir.model.layers.model import layers

    if args.json or args.target or args.gpu:
        raise options.UsageError("list: --graph goes without --json, --target and --gpu")
    with open_model(args.model) as file:
        step = StepOps(Config.of(file), rows=1)
        x = layers(step, embedding(step))
        if x is not None:
            head(step, x)
    print(step.graph)


def _list_model(args: argparse.Namespace) -> None:
    from urdir.ptxgen.tools.dump import describe

    gpu = arguments.gpu(args)
    found = arguments.of_model(args, gpu, args.all)
    if args.json:
        entries = [describe(kernel.spec, gpu.native_target) | kernel.as_dict() for kernel in found]
        print(json.dumps(entries, indent=2))
        return
    rows = [
        (
            str(kernel.most_launches),
            roles_text(kernel.roles),
            kernel.spec.name,
            f"{extent(kernel.spec.launch_shape.grid)} x {extent(kernel.spec.launch_shape.block)}",
            megabytes_text(kernel.spec.bytes_moved()),
            kernel.used_in(),
            fields_text(kernel.spec),
        )
        for kernel in found
    ]
    print_table(_COLUMNS, rows)
