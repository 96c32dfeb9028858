"""`urdir perplexity`: how well a model predicts a text, and how far it is from a base model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options, prompts, values
from urdir.model.commands.opening import engine_options, open_engine
from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.sampling import Logits
    from urdir.model.measure.base_logits import BaseLogits
    from urdir.model.measure.perplexity import Chunk, Floats

EXAMPLES = """\
  urdir perplexity model.gguf -f wiki.test.raw                      as llama-perplexity
  urdir perplexity model.gguf -f wiki.test.raw -c 2048 --chunks 20  a part of it
  urdir perplexity f16.gguf -f wiki.test.raw --save-logits base.kld
  urdir perplexity q4.gguf --kl-divergence base.kld                 how far it is from f16.gguf
  urdir perplexity model.gguf -f wiki.test.raw -ctk q8_0 -ctv q8_0  what a smaller cache costs
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "perplexity", run, "measure how well a model predicts a text", EXAMPLES
    )
    options.add_file(parser)
    options.add_llama_flags(parser, "model", "cache")
    options.add_adapters(parser)
    options.add_quantize(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "-f", "--file", dest="text", metavar="FILE", help="a file with the text; - is stdin"
    )
    text.add_argument("--tokens", metavar="1,2,3|@FILE", help="token ids, or a file of them")
    text.add_argument(
        "--kl-divergence",
        metavar="FILE",
        help="compare with log-probabilities of the same text that --save-logits, or "
        "llama-perplexity's --kl-divergence-base, wrote",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=values.whole_number(4),
        default=512,
        metavar="N",
        help="tokens of a chunk, of which the second half is scored (default: 512)",
    )
    parser.add_argument(
        "--chunks", type=values.whole_number(1), metavar="N", help="chunks at most (default: all)"
    )
    parser.add_argument(
        "-np",
        "--parallel",
        type=values.whole_number(1),
        default=8,
        metavar="N",
        help="chunks that share the steps (default: 8)",
    )
    parser.add_argument(
        "--save-logits", metavar="FILE", help="write the log-probabilities, for --kl-divergence"
    )
    parser.add_argument(
        "--exact", action="store_true", help="keep activations, keys and values in f32 throughout"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options.add_device(parser)
    options.add_gpus(parser)


def run(args: argparse.Namespace) -> int:
    """Score the chunks, and print a figure after each."""
    from urdir.model.measure.base_logits import BaseLogits

    if args.kl_divergence is None:
        chunks = _chunks(args)
        with _open(args, chunks) as engine:
            _measure(args, engine, chunks)
        return 0
    if args.save_logits is not None:
        raise options.UsageError("--save-logits: the base of --kl-divergence is saved already")
    with (
        BaseLogits.open(Path(args.kl_divergence)) as base,
        _open(args, base.chunks[: args.chunks]) as engine,
    ):
        _compare(args, engine, base)
    return 0


def _chunks(args: argparse.Namespace) -> list[Chunk]:
    """The chunks of the text. Each begins with BOS where the model wants one."""
    from urdir.model.engine.texts import open_texts
    from urdir.model.measure.perplexity import cut

    if args.tokens is not None:
        return cut(prompts.read_tokens(args.tokens), args.ctx_size, None, args.chunks)
    missing = "no text: name it with -f FILE, or pipe it in"
    text = prompts.read_prompt("-f", args.text, missing)
    with open_texts(options.one_model(args), args.quantize) as texts:
        tokenizer = texts.tokenizer
        tokens = tokenizer.encode(text, parse_special=True, add_bos=True)
        bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return cut(tokens, args.ctx_size, bos, args.chunks)


def _open(args: argparse.Namespace, chunks: Sequence[Chunk]) -> Engine:
    wanted = engine_options(args, options.one_model(args), len(chunks[0].tokens))
    keys, values = options.cache_types(args)
    return open_engine(
        replace(
            wanted,
            sequences=min(args.parallel, len(chunks)),
            kv_dtype=keys,
            value_dtype=values,
            exact=args.exact,
        )
    )


def _measure(args: argparse.Namespace, engine: Engine, chunks: Sequence[Chunk]) -> None:
    """Perplexity of the text; the log-probabilities are saved if a file is named."""
    from contextlib import ExitStack

    import numpy as np

    from urdir.model.measure.base_logits import packed, writing
    from urdir.model.measure.perplexity import Estimate, logits_of_chunks, losses_of_chunks

    losses = []
    with ExitStack() as files:
        found = losses_of_chunks(engine.session, chunks)
        if args.save_logits is not None:
            vocab = engine.config.vocab_size
            saved = files.enter_context(writing(Path(args.save_logits), chunks, vocab))

            def noted(chunk: Chunk, logits: Logits) -> Floats:
                saved.write(packed(logits).tobytes())
                return chunk.losses(logits)

            found = map(noted, chunks, logits_of_chunks(engine.session, chunks))
        for number, of_chunk in enumerate(found, 1):
            losses.append(of_chunk)
            estimate = Estimate.of(np.concatenate(losses))
            if not args.json:
                print(f"[{number}/{len(chunks)}] {estimate.value:.4f}", flush=True)
    if args.json:
        figures = {"perplexity": estimate.value, "error": estimate.error, "tokens": estimate.count}
        print(json.dumps(figures))
    else:
        print(f"perplexity {estimate} of {estimate.count} tokens")


def _compare(args: argparse.Namespace, engine: Engine, base: BaseLogits) -> None:
    """KL divergence from a base model."""
    from urdir.model.measure.divergence import Divergence
    from urdir.model.measure.perplexity import logits_of_chunks

    if base.vocab != engine.config.vocab_size:
        raise ModelError(
            f"{args.kl_divergence}: a vocabulary of {base.vocab} tokens, the model has "
            f"{engine.config.vocab_size}: compare models with the same vocabulary"
        )
    chunks = base.chunks[: args.chunks]
    found = logits_of_chunks(engine.session, chunks)
    parts = []
    for number, (chunk, rows, logits) in enumerate(
        zip(chunks, base.rows(), found, strict=False), 1
    ):
        parts.append(Divergence.of(chunk, rows, logits))
        if not args.json:
            print(f"[{number}/{len(chunks)}] {Divergence.joined(parts).kl.mean():.6f}", flush=True)
    table = Divergence.joined(parts).table()
    if args.json:
        print(json.dumps(table))
    else:
        for name, figure in table.items():
            print(f"{name:18} {figure:.6f}")
