"""Flags that several commands share, checked while they are parsed."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urdir.model.engine.sampling import SamplingSettings

Subparsers = Any  # argparse names this type only privately


class UsageError(Exception):
    """The command line asks for something impossible: exit code 2."""


def add_command(
    commands: Subparsers,
    name: str,
    handler: Callable[[argparse.Namespace], int],
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    """A sub-parser whose help ends in examples."""
    parser = add_group(commands, name, summary, examples)
    parser.set_defaults(handler=handler)
    return parser


def add_group(
    commands: Subparsers, name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    """A sub-parser like ``add_command``'s that has subcommands of its own in place of a handler."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: an integer within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        _check_bounds(value, low, high)
        return value

    return parse


#: first-last, first-last+step or first-last*factor
_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")


def number_list(low: int) -> Callable[[str], tuple[int, ...]]:
    """An argparse type: whole numbers from ``low`` on between commas, and ranges as llama-bench
    takes them: 1-4, 16-64+16, 16-256*2."""
    number = whole_number(low)

    def parse(text: str) -> tuple[int, ...]:
        found: list[int] = []
        for part in text.split(","):
            if (match := _RANGE.fullmatch(part)) is None:
                found.append(number(part))
                continue
            first, last, by = number(match[1]), number(match[2]), int(match[4] or 1)
            if (
                first > last
                or by < (2 if match[3] == "*" else 1)
                or (match[3] == "*" and not first)
            ):
                raise argparse.ArgumentTypeError(f"{part!r} is a range without an end")
            while first <= last:
                found.append(first)
                first = first * by if match[3] == "*" else first + by
        return tuple(found)

    return parse


def real_number(low: float, high: float | None = None) -> Callable[[str], float]:
    """An argparse type: a finite number within bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not finite")
        _check_bounds(value, low, high)
        return value

    return parse


def _check_bounds(value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise argparse.ArgumentTypeError(f"{value} must be {wanted}")


def _device(text: str) -> str:
    from urdir.driver.device import DeviceName
    from urdir.driver.errors import DriverError

    try:
        DeviceName.parse(text)
    except DriverError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    return text


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument(
        "--device",
        type=_device,
        metavar="auto|cuda[:i]|emulator[:sm_NN]",
        help="where to run; auto takes a GPU if there is one, else the emulator "
        "(default: $URDIR_DEVICE or auto)",
    )


MODEL_HELP = (
    "GGUF file, any part of a split one, a folder with config.json and safetensors, or "
    "hf:org/repo[:file-or-type] on the Hugging Face hub"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """-m / --model, -hf, --quantize, -c / --ctx-size."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "-m", "--model", metavar="FILE", help=f"{MODEL_HELP} (default: the demo model)"
    )
    model.add_argument(
        "-hf",
        "--hf-repo",
        dest="model",
        type=lambda text: f"hf:{text}",
        metavar="ORG/REPO[:TYPE]",
        help="the same as -m hf:ORG/REPO[:TYPE] (default of TYPE: Q4_K_M, or what there is)",
    )
    add_quantize(parser)
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=whole_number(1),
        metavar="N",
        help="context in tokens (default: the smaller of the model's and 4096)",
    )


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """--quantize."""
    from urdir.model.files.quantised import QUANTISED

    parser.add_argument(
        "--quantize",
        choices=QUANTISED,
        metavar="TYPE",
        help=f"of a folder: the type of its matrices, {', '.join(QUANTISED)} (default: as stored)",
    )


def add_generation(parser: argparse.ArgumentParser) -> None:
    """-n --stop --ignore-eos."""
    parser.add_argument(
        "-n",
        "--n-predict",
        type=whole_number(0),
        metavar="N",
        help="tokens to generate at most (default: until the end or a full context)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """-s --temp --top-k --top-p --min-p, the penalties, --logit-bias, --min-tokens."""
    group = parser.add_argument_group("sampling")
    flags: tuple[tuple[tuple[str, ...], Callable[[str], Any], Any, str], ...] = (
        (("-s", "--seed"), whole_number(0, 2**64 - 1), None, "random seed (default: a new one)"),
        (("--temp",), real_number(0), 0.8, "temperature; 0 is greedy (default: 0.8)"),
        (("--top-k",), whole_number(0), 40, "keep the K likeliest; 0 keeps all (default: 40)"),
        (("--top-p",), real_number(0, 1), 0.95, "share of probability kept (default: 0.95)"),
        (
            ("--min-p",),
            real_number(0, 1),
            0.05,
            "drop less than this of the best (default: 0.05)",
        ),
        (("--repeat-penalty",), real_number(1e-3), 1.0, "divide repeated logits (default: 1, off)"),
        (
            ("--repeat-last-n",),
            whole_number(-1),
            64,
            "tokens that --repeat-penalty looks back on, also the prompt's; -1: all (default: 64)",
        ),
        (
            ("--presence-penalty",),
            real_number(-100, 100),
            0.0,
            "subtract from logits of tokens that the answer has: OpenAI's, the prompt does not "
            "count (default: 0, off)",
        ),
        (
            ("--frequency-penalty",),
            real_number(-100, 100),
            0.0,
            "the same for each time that the answer has them (default: 0, off)",
        ),
        (("--min-tokens",), whole_number(0), 0, "tokens before the end may come (default: 0)"),
    )
    for names, kind, default, text in flags:
        group.add_argument(*names, type=kind, default=default, metavar="N", help=text)
    group.add_argument(
        "--logit-bias",
        "-l",
        type=_bias,
        action="append",
        default=[],
        metavar="ID(+/-)BIAS",
        help="add to a token's logit, as 15043+1 or 15043-1; repeatable",
    )


def _bias(text: str) -> tuple[int, float]:
    """An argparse type: a token id and what is added to its logit, as llama.cpp writes them."""
    found = re.fullmatch(r"(\d+)([+-].+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID+BIAS or ID-BIAS")
    return int(found[1]), real_number(-100, 100)(found[2])


def sampling_settings(args: argparse.Namespace) -> SamplingSettings:
    """The settings that ``add_sampling``'s flags ask for; a seed is drawn where none is given.

    Raises UsageError for flags that do not go together.
    """
    from urdir.model.engine.sampling import SamplingSettings
    from urdir.model.errors import SettingsError

    try:
        return SamplingSettings(
            temperature=args.temp,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repeat_penalty=args.repeat_penalty,
            repeat_last_n=args.repeat_last_n,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
            logit_bias=tuple(args.logit_bias),
            min_tokens=args.min_tokens,
            seed=int.from_bytes(os.urandom(4)) if args.seed is None else args.seed,
        )
    except SettingsError as exc:
        raise UsageError(str(exc)) from None
