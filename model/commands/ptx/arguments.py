"""Flags that the subcommands of `urdir ptx` share, and the kernels that they name."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from urdir.model.commands import options, values
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.model.measure.model_kernels import ModelKernel
    from urdir.ptxgen.spec import KernelSpec
    from urdir.ptxgen.tools.gpus import Gpu


def add_kernel(parser: argparse.ArgumentParser) -> None:
    """KERNEL --set."""
    parser.add_argument(
        "kernel", nargs="?", metavar="KERNEL", help="see urdir ptx list; or module:Class"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="FIELD=VALUE",
        help="a field of the specialisation; repeatable. Those not set are as in the kernel's "
        "first example that can have these",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """-m / --model, -c / --ctx-size."""
    parser.add_argument(
        "-m",
        "--model",
        metavar="FILE",
        help="all kernels of this GGUF file's decode and prompt steps; demo is the demo model",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=values.whole_number(0),
        metavar="N",
        help="context in tokens; 0: the model's (default: as urdir run has it)",
    )


def add_all(parser: argparse.ArgumentParser) -> None:
    """--all."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="of --model: the kernels of prompts of every size; without it, those that differ in "
        "the number of rows are one",
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """--target --gpu."""
    parser.add_argument("--target", metavar="sm_NN", help="what PTX is made for (default: sm_90)")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="the GPU in mind (h200, l4, ...): its target, number of SMs and speed",
    )


def check_kernel(args: argparse.Namespace, command: str) -> None:
    """Refuse a command line without KERNEL and --model, or with both."""
    if args.kernel is None and args.model is None:
        raise options.UsageError(f"{command}: give a KERNEL (see urdir ptx list), or --model FILE")
    if args.kernel is not None and args.model is not None:
        raise options.UsageError(f"{command}: give a KERNEL or --model FILE, not both")
    if args.model is not None and args.settings:
        raise options.UsageError(f"{command}: --set belongs to a KERNEL, not to --model")
    if args.kernel is not None and args.ctx_size is not None:
        raise options.UsageError(f"{command}: -c belongs to --model")


def gpu(args: argparse.Namespace) -> Gpu:
    """The GPU that --gpu and --target ask for, its target that of --target."""
    from urdir.ptxgen.tools.gpus import choose_gpu

    return choose_gpu(args.gpu, args.target)


def one_kernel(args: argparse.Namespace) -> KernelSpec:
    """The spec that KERNEL and --set name."""
    from urdir.ptxgen.catalog import kernel
    from urdir.ptxgen.tools.settings import specialise

    return specialise(kernel(args.kernel), args.settings)


def of_model(args: argparse.Namespace, gpu: Gpu, every: bool = True) -> tuple[ModelKernel, ...]:
    """The specialisations that --model uses on ``gpu``; prompts of several sizes are folded
    unless ``every`` one is asked for."""
    from urdir.model.engine.options import chosen_context
    from urdir.model.families.config import Config
    from urdir.model.files.source import open_model
    from urdir.model.measure.model_kernels import folded, model_kernels

    with open_model(args.model) as gguf:
        config = Config.of(gguf)
        context = chosen_context(config, args.ctx_size)
        with Progress("planning"):
            found = model_kernels(gguf, config, context, gpu.native_target, gpu.sm_count)
    print(
        f"{len(found)} kernels for {gpu.native_target}, {gpu.sm_count} SMs ({gpu.title}), "
        f"a context of {context} tokens",
        file=sys.stderr,
    )
    if every:
        return found
    kept = folded(found)
    if len(kept) < len(found):
        print(
            f"{len(found) - len(kept)} of them are those of shorter prompts, which differ from "
            "others in the number of rows: --all shows them",
            file=sys.stderr,
        )
    return kept
