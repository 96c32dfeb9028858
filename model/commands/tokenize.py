"""`urdir tokenize`: the token ids of a text."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options, prompts

if TYPE_CHECKING:
    from urdir.model.text.tokenizer import Tokenizer

EXAMPLES = """\
  urdir tokenize model.gguf "Once upon a time"          ids, as --tokens takes them
  urdir tokenize model.gguf "Once upon a time" --json   ids with the text of each
  echo "Once" | urdir tokenize model.gguf               a text on stdin
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(commands, "tokenize", run, "print the tokens of a text", EXAMPLES)
    options.add_file(parser)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the text (default: stdin)")
    options.add_llama_flags(parser, "model")
    parser.add_argument("--no-bos", action="store_true", help="do not begin with BOS")
    parser.add_argument(
        "--no-parse-special",
        action="store_true",
        help="read <|name|> of a control token as plain text",
    )
    parser.add_argument("--json", action="store_true", help="print ids and pieces as JSON")


def run(args: argparse.Namespace) -> int:
    """Tokenise, without a device."""
    from urdir.model.engine.texts import open_texts

    model, text = options.model_and_word(args, "text")
    if text is not None:
        text = prompts.given_text("TEXT", text)
    else:
        text = prompts.read_stdin("no text: give it after the model, or pipe it in")
    with open_texts(model) as texts:
        tokenizer = texts.tokenizer
        ids = tokenizer.encode(
            text, parse_special=not args.no_parse_special, add_bos=not args.no_bos
        )
        if args.json:
            tokens = [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]
            print(json.dumps({"count": len(ids), "tokens": tokens}))
        else:
            print(",".join(map(str, ids)))
    return 0


def _piece(tokenizer: Tokenizer, token: int) -> Any:
    """The text of a token, or its bytes if they are not UTF-8."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
