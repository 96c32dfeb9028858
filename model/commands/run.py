"""`urdir run`: one answer, streamed to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options
from urdir.model.commands.opening import open_engine, template_process
from urdir.model.commands.report import end_note, print_statistics, statistics_dict
from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.generate import Generation
    from urdir.model.text.sandbox import TemplateProcess

EXAMPLES = """\
  urdir run -p "What is 27 plus 45?"                     the built-in demo model
  urdir run -m model.gguf -p "Tell me a story" -n 200    at most 200 tokens
  urdir run -hf org/repo-GGUF:Q8_0 -p "Hello"            a model on the Hugging Face hub
  urdir run -m folder --quantize q8_0 -p "Hello"         safetensors, smaller while loaded
  urdir run -m model.gguf --raw -p "Once upon a time"    no chat template
  echo "Sort 31, 7, 19." | urdir run --temp 0 --json     prompt from stdin, JSON to stdout
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(commands, "run", run, "answer one prompt", EXAMPLES)
    options.add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: stdin)")
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    options.add_generation(parser)
    options.add_sampling(parser)
    options.add_device(parser)
    parser.add_argument("--verbose", action="store_true", help="say what is used, on stderr")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    """Generate; Ctrl-C keeps the text so far and still prints the statistics."""
    prompt = _read_prompt(args)
    generation: Generation

    def begin(engine: Engine) -> None:
        """Do what can be done before the weights are there."""
        nonlocal generation
        generation = _generation(engine, args, _encode(engine, args, prompt, process))
        generation.prepare()

    with (
        nullcontext() if args.raw else template_process() as process,
        open_engine(args, args.model, args.ctx_size, text=True, meanwhile=begin) as engine,
    ):
        if args.verbose:
            _describe(engine)
        interrupted, text = _stream(generation, quiet=args.json)
    if args.json:
        report = {"text": text, "statistics": statistics_dict(generation.statistics)}
        print(json.dumps(report, ensure_ascii=False))
    end_note(generation.statistics, engine.session.context)
    print_statistics(generation.statistics)
    return 130 if interrupted else 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is not None:
        try:
            return Path(args.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ModelError(f"-f {args.file}: cannot be read: {exc}") from exc
    if sys.stdin is None or sys.stdin.isatty():
        raise options.UsageError("no prompt: give -p TEXT or -f FILE, or pipe it in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise ModelError(f"the prompt on stdin is not UTF-8: {exc}") from exc


def _generation(engine: Engine, args: argparse.Namespace, prompt: list[int]) -> Generation:
    from urdir.model.engine.generate import Generation

    return Generation(
        engine.session,
        engine.tokenizer,
        prompt,
        options.sampling_settings(args),
        limit=args.n_predict,
        stops=args.stop,
        ignore_end=args.ignore_eos,
        host_sampling=engine.host_sampling,
    )


def _encode(
    engine: Engine, args: argparse.Namespace, prompt: str, process: TemplateProcess | None
) -> list[int]:
    if process is None:
        tokens = engine.tokenizer.encode(prompt, parse_special=True, add_bos=True)
    else:
        from urdir.model.text.chat import ChatTemplate, Message

        turns = [Message("system", args.system)] if args.system else []
        turns.append(Message("user", prompt))
        with ChatTemplate.from_gguf(engine.gguf, engine.tokenizer, process) as template:
            tokens = template.encode(turns)
    if not tokens:
        raise ModelError("the prompt is empty: the model needs at least one token to go on from")
    return tokens


def _stream(generation: Generation, quiet: bool) -> tuple[bool, str]:
    """Print the text as it comes; (interrupted, all of it)."""
    pieces: list[str] = []
    interrupted = False
    try:
        for piece in generation.text():
            pieces.append(piece)
            if not quiet:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return interrupted, "".join(pieces)


def _describe(engine: Engine) -> None:
    device, session = engine.device, engine.session
    print(
        f"model {engine.name}, {engine.weights.nbytes:,} bytes of weights, "
        f"loaded in {engine.seconds['weights']:.2f} s\n"
        f"device {device.name}: {device.properties.name}, kernels for {device.target}\n"
        f"context {session.context} tokens, KV cache {session.parts.cache.nbytes:,} bytes "
        f"({session.parts.cache.layout(0).dtype})",
        file=sys.stderr,
    )
