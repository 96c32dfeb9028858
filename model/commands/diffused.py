"""The answers of `urdir run` by models that fill masked tokens."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options
from urdir.model.commands.options import UsageError
from urdir.model.commands.terminal import shown
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from urdir.model.engine.diffusion import DiffusionSettings
    from urdir.model.engine.engine import Engine

#: Tokens of an answer by default, as many as fit.
_LENGTH = 128
_PREFIX = "diffusion_"


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that are given, by their names without the prefix."""
    values = {name: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    return {
        name.removeprefix(_PREFIX): of
        for name, of in values.items()
        if of is not None and of is not False
    }


def check_none(args: argparse.Namespace, architecture: str) -> None:
    """Raise UsageError for flags that a model does not read."""
    for name in given(args):
        flag = f"--{_PREFIX}{name}".replace("_", "-")
        raise UsageError(f"{flag}: '{architecture}' models do not fill masked tokens")


def diffusion_settings(args: argparse.Namespace) -> DiffusionSettings:
    """What the flags say. Raises UsageError for two schedules."""
    from urdir.model.engine.diffusion import ALGORITHMS, DiffusionSettings

    found = given(args)
    found.pop("visual", None)
    if "algorithm" in found:
        found["algorithm"] = ALGORITHMS[found["algorithm"]]
    found["gumbel_noise"] = bool(found.pop("add_gumbel_noise", 0))
    found = {name: value for name, value in found.items() if value or name == "algorithm"}
    if "eps" in found and "block_length" in found:
        raise UsageError("--diffusion-eps and --diffusion-block-length: give one of them")
    return DiffusionSettings(**found)


def answer(engine: Engine, args: argparse.Namespace, prompt: Sequence[int]) -> None:
    """Fill an answer, and print it."""
    from urdir.model.engine.diffusion import Masks

    how, tokenizer = diffusion_settings(args), engine.tokenizer
    length = args.n_predict or min(_LENGTH, max(1, engine.encoder.context - len(prompt)))
    settings = options.sampling_settings(args, metadata=engine.file.metadata)
    ends = frozenset(() if args.ignore_eos else tokenizer.end_ids)
    mask = Masks.of(engine.file.metadata, engine.config.vocab_size).token
    steps = engine.diffusion(prompt, length=length, settings=settings, diffusion=how)
    tokens: Sequence[int] = ()
    with Progress("filling", how.steps, shown=not args.diffusion_visual) as progress:
        for tokens in steps:
            progress.advance()
            if args.diffusion_visual:
                known = [of for of in tokens[len(prompt) :] if of != mask]
                print(shown(tokenizer.decode(known)), file=sys.stderr)
    text = tokenizer.decode(takewhile(lambda of: of not in ends, tokens[len(prompt) :]))
    for stop in args.stop:
        text = text.partition(stop)[0]
    if args.json:
        print(json.dumps({"text": text, "prompt_tokens": len(prompt)}))
    else:
        print(shown(text))
