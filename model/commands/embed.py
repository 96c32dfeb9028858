"""`urdir embed`: embeddings of texts, or of a ranking model the scores."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options, prompts, values
from urdir.model.commands.opening import engine_options, open_engine
from urdir.model.families.pooling import POOLINGS

if TYPE_CHECKING:
    from urdir.model.engine.encoding.encoder import Floats
    from urdir.model.engine.engine import Engine

EXAMPLES = """\
  urdir embed bge.gguf "a text" "another text" --output vectors.npy
  urdir embed bge.gguf --tokens 101,7592,102 --tokens @tokens.txt --output vectors.npy
  urdir embed qwen3-embedding.gguf "a text" --no-normalize --output vectors.npy
  urdir embed reranker.gguf --query "what is a warp?" "a document" "another"   scores, printed
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "embed", run, "write embeddings of texts, or scores of a ranking model", EXAMPLES
    )
    options.add_file(parser)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text to embed")
    options.add_llama_flags(parser, "model", "context")
    options.add_quantize(parser)
    parser.add_argument(
        "--tokens",
        action="append",
        default=[],
        metavar="1,2,3|@FILE",
        help="token ids of a text, or a file of them; repeatable",
    )
    parser.add_argument(
        "--query", type=values.text, metavar="TEXT", help="score the texts as answers to this one"
    )
    parser.add_argument(
        "--pooling", choices=POOLINGS, help="what is made of the states of a text (the file's)"
    )
    parser.add_argument(
        "--no-normalize", action="store_true", help="leave embeddings of any length"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT.npy",
        help="(n, width) float32, scores (n, labels), with --pooling none a row for each token "
        "(default: print a line for each row)",
    )
    parser.add_argument("--exact", action="store_true", help="keep activations in f32 throughout")
    parser.add_argument(
        "--json", action="store_true", help="print what was written, or the rows, as JSON"
    )
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Embed all texts, and save or print the rows."""
    output = None if args.output is None else options.output_file(args)
    texts = list(args.texts)
    if args.model is not None and args.file is not None:
        texts.insert(0, args.file)
        args.file = None
    texts = [prompts.given_text("TEXT", text) for text in texts]
    tokens = [prompts.read_tokens(text) for text in args.tokens]
    if bool(texts) == bool(tokens):
        raise options.UsageError("give texts, or the ids of their tokens with --tokens")
    if args.query is not None and tokens:
        raise options.UsageError("--query: give the texts that are scored, not their tokens")
    if args.query is not None and (args.pooling is not None or args.no_normalize):
        raise options.UsageError("--query makes scores: leave --pooling and --no-normalize out")
    wanted = replace(
        engine_options(args, options.one_model(args), args.ctx_size),
        exact=args.exact,
        embeddings=True,
        text=bool(texts),
    )
    with open_engine(wanted) as engine:
        rows = _rows(engine, args, texts or tokens)
    if output is None:
        _print(rows, as_json=args.json)
        return 0
    _save(output, rows)
    if args.json:
        print(json.dumps({"output": str(output), "shape": rows.shape}))
    return 0


def _rows(
    engine: Engine, args: argparse.Namespace, texts: Sequence[str] | Sequence[Sequence[int]]
) -> Floats:
    """The embeddings or scores."""
    if args.query is not None:
        documents = [text for text in texts if isinstance(text, str)]
        return engine.rerank(args.query, documents)[:, None]
    return engine.embed(texts, pooling=args.pooling, normalize=not args.no_normalize)


def _print(rows: Floats, *, as_json: bool) -> None:
    """Numbers that read back as the same f32."""
    if as_json:
        print(json.dumps({"rows": [[float(str(of)) for of in row] for row in rows]}))
        return
    for row in rows:
        print(*row)


def _save(output: Path, rows: Floats) -> None:
    import numpy as np

    from urdir.model.files.written import whole_file

    with whole_file(output, "--output ") as part, part.open("wb") as file:
        np.save(file, rows)
