"""`urdir logits`: the logits of every position, as a conformance and debugging tool."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from urdir.model.commands import options, values
from urdir.model.commands.opening import engine_options, open_engine
from urdir.model.errors import ModelError

EXAMPLES = """\
  urdir logits model.gguf --tokens 1,150,298 --output logits.npy
  urdir logits model.gguf --tokens @tokens.txt --output logits.npy --exact
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "logits", run, "write the logits of every position of a token sequence", EXAMPLES
    )
    options.add_file(parser, optional=True)
    options.add_llama_flags(parser, "model")
    options.add_quantize(parser)
    parser.add_argument(
        "--tokens", required=True, metavar="1,2,3|@FILE", help="token ids, or a file of them"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT.npy", help="(n_tokens, n_vocab) float32"
    )
    parser.add_argument(
        "--exact", action="store_true", help="keep activations, keys and values in f32 throughout"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    options.add_device(parser)
    options.add_gpus(parser)


def run(args: argparse.Namespace) -> int:
    """Give the tokens one by one and save the rows."""
    import numpy as np

    from urdir.model.engine.logits import logits_after
    from urdir.model.progress import Progress

    tokens = read_tokens(args.tokens)
    output = Path(args.output)
    if not output.parent.is_dir():
        raise ModelError(f"--output {output}: no such folder {output.parent}")
    wanted = replace(
        engine_options(args, options.one_model(args), len(tokens)),
        kv_dtype="f32" if args.exact else "f16",
        exact=args.exact,
    )
    with open_engine(args, wanted) as engine:
        size = engine.config.vocab_size
        if (highest := max(tokens)) >= size:
            raise options.UsageError(
                f"--tokens: {highest} is outside the vocabulary of {size} tokens"
            )
        rows = np.empty((len(tokens), size), np.float32)
        with Progress("logits", len(tokens)) as progress:
            for i, logits in enumerate(logits_after(engine.session, tokens[:1], tokens[1:])):
                rows[i] = logits
                progress.advance()
    try:
        with output.open("wb") as file:
            np.save(file, rows)
    except OSError as exc:
        raise ModelError(f"--output {output}: {exc.strerror}") from exc
    if args.json:
        print(json.dumps({"output": str(output), "shape": rows.shape}))
    return 0


def read_tokens(text: str) -> list[int]:
    """Token ids from "1,2,3" or, after an @, from a file with ids between commas or blanks."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ModelError(f"--tokens {text}: cannot be read: {exc}") from exc
    try:
        tokens = [values.whole_number(0)(word) for word in text.replace(",", " ").split()]
    except argparse.ArgumentTypeError as exc:
        raise options.UsageError(f"--tokens: {exc}; give ids such as 1,2,3") from exc
    if not tokens:
        raise options.UsageError("--tokens: no token given; give ids such as 1,2,3")
    return tokens
