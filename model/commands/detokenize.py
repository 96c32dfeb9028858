"""`urdir detokenize`: the text of token ids."""

from __future__ import annotations

import argparse
import json

from urdir.model.commands import options, prompts
from urdir.model.commands.terminal import shown

EXAMPLES = """\
  urdir detokenize model.gguf 1,150,298
  urdir detokenize model.gguf @tokens.txt --json
  echo "1 150 298" | urdir detokenize model.gguf
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "detokenize", run, "print the text of token ids", EXAMPLES
    )
    options.add_file(parser)
    parser.add_argument(
        "ids",
        nargs="?",
        metavar="1,2,3|@FILE",
        help="token ids, or a file of them (default: stdin)",
    )
    options.add_llama_flags(parser, "model")
    parser.add_argument("--json", action="store_true", help="print the text as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the text, control tokens too, without a device."""
    from urdir.model.engine.texts import open_texts

    model, ids = options.model_and_word(args, "ids")
    if ids is None:
        ids = prompts.read_stdin("no ids: give them after the model, or pipe them in")
    tokens = prompts.read_tokens(ids, "IDS")
    with open_texts(model) as texts:
        text = texts.tokenizer.decode(tokens, keep_control=True)
    print(json.dumps({"text": text}) if args.json else shown(text))
    return 0
