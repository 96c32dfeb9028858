"""Parsers of commands, and flags that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from urdir.model.commands import values
from urdir.model.commands.flags import add_flags
from urdir.model.commands.llama_flags import FLAGS, MODEL_HELP
from urdir.model.commands.llama_flags.generation import setting_flag
from urdir.model.engine.sampling_settings import DEFAULTS, SETTINGS, SamplingSettings
from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.commands.parser import Parser
    from urdir.model.memory.draft_settings import DraftSettings
    from urdir.ptxgen.kernels.attention.kv_types import KvDtype

Subparsers = Any  # argparse names this type only privately


class UsageError(Exception):
    """Impossible request on the command line: exit code 2."""


def add_command(
    commands: Subparsers,
    name: str,
    handler: Callable[[argparse.Namespace], int],
    summary: str,
    examples: str,
) -> Parser:
    """A sub-parser whose help ends in examples."""
    parser = add_group(commands, name, summary, examples)
    parser.set_defaults(handler=handler)
    return parser


def add_group(commands: Subparsers, name: str, summary: str, examples: str) -> Parser:
    """A sub-parser like ``add_command``'s with subcommands instead of a handler."""
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + examples,
    )
    return parser


def add_llama_flags(parser: argparse._ActionsContainer, *groups: str, **changed: Any) -> None:
    """Declare the flags of llama.cpp in ``groups``, including those without effect. ``changed``
    are options of `add_argument` that override the table's."""
    for group in groups:
        add_flags(parser, FLAGS, group, **changed)


def cache_types(args: argparse.Namespace) -> tuple[KvDtype, KvDtype]:
    """How keys and values are stored: -ctk and -ctv, otherwise f32 with --exact."""
    otherwise: KvDtype = "f32" if args.exact else "f16"
    return args.cache_type_k or otherwise, args.cache_type_v or otherwise


def add_adapters(parser: argparse._ActionsContainer) -> None:
    """--lora and --lora-scaled."""
    from urdir.model.commands.llama_flags import adapters

    add_flags(parser, adapters.GIVEN, "text")


def add_many(group: argparse._ArgumentGroup) -> None:
    """``parallel`` and ``gpu_memory_share``, for a model that serves many requests at once."""
    add_llama_flags(group, "many")
    group.add_argument(
        "--gpu-memory-share",
        type=values.real_number(0.1, 1.0),
        metavar="X",
        help="of the memory that is free: for weights and cache (0.9; of several models an equal "
        "part of that each)",
    )
    group.add_argument(
        "--prefix-host-memory",
        type=values.byte_size,
        default=0,
        metavar="SIZE",
        help="host memory, such as 16G, for prefixes that leave the GPU's cache (0: none)",
    )
    group.add_argument(
        "--prefix-dir",
        "--slot-save-path",
        type=Path,
        metavar="DIR",
        help="folder for prefixes that POST /slots/N?action=save saves and restore restores",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The sampling flags of llama.cpp, and --min-tokens."""
    add_llama_flags(parser, "sampling")
    add_flags(parser, [setting_flag("min_tokens", "--min-tokens")], "sampling")


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument(
        "-dev",
        "--device",
        type=values.device,
        metavar="auto|cuda[:i]|emulator[:sm_NN]",
        help="where to run; auto takes a GPU if there is one, else the emulator "
        "(default: $URDIR_DEVICE or auto)",
    )


def add_placement(parser: argparse._ActionsContainer, memory: str = "--device-memory") -> None:
    """-ngl, -cmoe, -ncmoe, -ot, --fit and ``memory``."""
    add_llama_flags(parser, "placement")
    parser.add_argument(
        "--expert-slots",
        type=values.whole_number(0),
        metavar="N",
        help="of streamed experts keep those of each layer that were used last on the GPU, N of "
        "them (default: as many as fit)",
    )
    parser.add_argument(
        memory,
        type=values.byte_size,
        dest="device_memory",
        metavar="SIZE",
        help="use no more than this of a GPU's memory, such as 20G; what does not fit is streamed",
    )
    parser.add_argument(
        "--host-memory",
        type=values.byte_size,
        metavar="SIZE",
        help="stream no more than this from the host's memory (default: what is free)",
    )
    parser.add_argument(
        "--stream-dir",
        type=Path,
        metavar="DIR",
        help="a folder for layers that do not fit the host's memory: written once, read before "
        "each use",
    )


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """--gpus."""
    parser.add_argument(
        "--gpus",
        type=values.gpus,
        metavar="N|I,J",
        help="share the model among N GPUs, or those with these numbers (default: one has it all)",
    )
    parser.add_argument(
        "--split",
        choices=("tensors", "layers"),
        default="tensors",
        help="what each of --gpus has: a share of every layer, or, for a model that only has to "
        "fit, a run of layers (default: tensors)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """-m / --model, -hf, --quantize, -c / --ctx-size."""
    add_llama_flags(parser, "model", "context")
    add_quantize(parser)


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """--quantize."""
    from urdir.model.files.wanted_types import QUANTISED

    parser.add_argument(
        "--quantize",
        type=str.lower,
        choices=QUANTISED,
        metavar="TYPE",
        help=f"of a folder: the type of its matrices, {', '.join(QUANTISED)} (default: as stored)",
    )


def add_prompt_arithmetic(parser: argparse.ArgumentParser) -> None:
    """--prompt-arithmetic."""
    from urdir.model.engine.options import PROMPT_ARITHMETIC

    parser.add_argument(
        "--prompt-arithmetic",
        choices=PROMPT_ARITHMETIC,
        default="f16",
        help="how prompts, and many sequences together, are multiplied on sm_80 and newer: int8 is "
        "faster and less precise, auto takes it where little is lost (default: f16)",
    )


def add_file(parser: argparse.ArgumentParser) -> None:
    """A model as a positional argument, which may be missing: it may be given with a flag."""
    parser.add_argument("file", nargs="?", metavar="MODEL", help=MODEL_HELP)


def output_file(args: argparse.Namespace) -> Path:
    """The file of --output. Raises ModelError for one that cannot be, before any work."""
    output = Path(args.output)
    if args.output == "-":
        raise UsageError("--output -: give the name of a file; /dev/stdout is one")
    if output.is_dir():
        raise ModelError(f"--output {output}: a folder; give the name of a file")
    if not output.parent.is_dir():
        raise ModelError(f"--output {output}: no such folder {output.parent}")
    return output


def one_model(args: argparse.Namespace) -> str | None:
    """The model, given with or without a flag; None without a model."""
    if args.file is not None and args.model is not None:
        raise UsageError(f"two models: {args.file} and {args.model}")
    named: str | None = args.file if args.model is None else args.model
    return named


def model_and_word(args: argparse.Namespace, name: str) -> tuple[str | None, str | None]:
    """The model, and the word ``name`` after it, of which each may be missing; with a flag for the
    model the first word is not the model."""
    word: str | None = getattr(args, name)
    if args.model is None:
        return args.file, word
    if args.file is not None and word is not None:
        raise UsageError(f"two models: {args.file} and {args.model}")
    return args.model, args.file


def draft(args: argparse.Namespace) -> str | None:
    """Whose drafts steps verify, from --spec-type and -md, as `EngineOptions.draft` has it; None
    for no drafts."""
    from urdir.model.commands.llama_flags.draft import FILES, HEADS, NGRAMS

    kind, file = args.spec_type, args.model_draft
    if kind == "none" or (kind is None and file is None):
        return None
    if kind in (*NGRAMS, *HEADS):
        if file is not None:
            raise UsageError(f"--spec-type {kind} needs no draft model: leave -md {file} out")
        return "ngram" if kind in NGRAMS else "mtp"
    if file is None:
        assert kind in FILES
        raise UsageError(f"--spec-type {kind}: give the file of the draft model with -md")
    named: str = file
    return named


def drafts(args: argparse.Namespace) -> DraftSettings | None:
    """Draft settings from --draft-max, --draft-min, --draft-p-min and --spec-ngram-size-n, for what
    `draft` says; None for no drafts."""
    if (source := draft(args)) is None:
        _say_undrafted(args)
        return None
    from urdir.model.engine.options import MODEL_DRAFTS
    from urdir.model.memory.draft_settings import DraftSettings

    kind, usual = ("ngram", DraftSettings().most) if source == "ngram" else ("model", MODEL_DRAFTS)
    most = args.draft_max or max(usual, args.draft_min)
    if args.draft_min > most:
        raise UsageError(f"--draft-min {args.draft_min} of --draft-max {most}")
    longest: int = args.spec_ngram
    return DraftSettings(
        kind=kind,
        most=most,
        least=args.draft_min,
        longest=longest,
        shortest=min(DraftSettings().shortest, longest),
        tokens=args.draft_vocab,
        p_min=args.draft_p_min,
    )


def _say_undrafted(args: argparse.Namespace) -> None:
    """Say on stderr which flags of drafts have no effect, as nothing is drafted."""
    from urdir.model.memory.draft_settings import DraftSettings

    usual = DraftSettings()
    flags = {
        "--draft-max": (args.draft_max, None),
        "--draft-min": (args.draft_min, usual.least),
        "--draft-p-min": (args.draft_p_min, usual.p_min),
        "--draft-vocab": (args.draft_vocab, usual.tokens),
        "--spec-ngram-size-n": (args.spec_ngram, usual.longest),
    }
    for flag, (given, default) in flags.items():
        if given != default:
            print(f"urdir: {flag} changes nothing without -md or --spec-type", file=sys.stderr)


def chunk(args: argparse.Namespace) -> int | None:
    """Maximum number of prompt tokens that are processed at once."""
    return min((n for n in (args.batch_size, args.ubatch_size) if n), default=None)


def sampling_settings(
    args: argparse.Namespace,
    usual: SamplingSettings = DEFAULTS,
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingSettings:
    """Sampling settings from the flags; for flags that are not given those that the model's
    ``metadata`` recommend, then those of ``usual``."""
    given = {name: getattr(args, name, None) for name in SETTINGS}
    given["logit_bias"] = tuple(args.logit_bias) if args.logit_bias else None
    usual = usual.of_file(metadata)
    return replace(usual, **{name: value for name, value in given.items() if value is not None})
