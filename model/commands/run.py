"""`urdir run`: one answer, streamed to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options, prompts
from urdir.model.commands.opening import answer_options, load
from urdir.model.commands.options import UsageError
from urdir.model.commands.report import end_note, print_engine, print_statistics, statistics_dict
from urdir.model.commands.terminal import shown
from urdir.model.progress import until_first

if TYPE_CHECKING:
    from urdir.model.engine.generate import Generation
    from urdir.model.engine.requests.request import Request
    from urdir.model.text.chat import ChatTemplate, Prompt
    from urdir.model.text.thought_limit import ThoughtLimit

EXAMPLES = """\
  urdir run "What is 27 plus 45?"                     the built-in demo model
  urdir run model.gguf "Tell me a story" -n 50        at most 50 tokens of your model
  urdir run -m model.gguf -p "Tell me a story"        the same with llama.cpp's flags
  urdir run -hf org/repo-GGUF:Q8_0 "Hello"            a model on the Hugging Face hub
  urdir run folder --quantize q8_0 "Hello"            safetensors, smaller while loaded
  urdir run model.gguf --gpus 2 "Hello"               a half of the model on each of two GPUs
  urdir run model.gguf --raw "Once upon a time"       no chat template
  echo "Sort 31, 7, 19." | urdir run --temp 0 --json  prompt from stdin, JSON to stdout

Flags mean what they mean in llama.cpp. Those of its flags that change nothing here are taken with a
line on stderr; those that are not there are refused with what comes nearest.
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(commands, "run", run, "answer one prompt", EXAMPLES)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL PROMPT",
        help="the model, and the prompt (default: stdin); a prompt with a blank may stand alone",
    )
    options.add_model(parser)
    options.add_llama_flags(parser, "memory", "prompt", "template", "generation", "text", "run")
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    options.add_sampling(parser)
    options.add_device(parser)
    options.add_gpus(parser)
    options.add_placement(parser)
    options.add_prompt_arithmetic(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.read_variables(prompts.name_a_model)


def run(args: argparse.Namespace) -> int:
    """Generate; Ctrl-C keeps the text so far and still prints the statistics."""
    from urdir.model.engine.engine import Engine

    prompts.take_words(args)
    system, template = prompts.given_system(args), prompts.given_template(args)
    variables = prompts.given_variables(args)
    if args.raw and (system is not None or template is not None):
        raise UsageError("--raw continues the text: without a system message or a chat template")
    prompt = prompts.given_prompt(args)
    if prompt is None:
        prompt = prompts.read_stdin()
        if not prompt:
            raise UsageError("no prompt: stdin is empty; give it after the model, or with -p TEXT")
    wanted = answer_options(args, chat=not args.raw, chat_template=template)
    with load(wanted) as loading:
        thoughts = None
        if args.raw:
            tokens = loading.tokenizer.encode(prompt, parse_special=True, add_bos=True)
        else:
            asked = _rendered(loading.template, system, prompt, variables)
            tokens = loading.template.tokens(asked)
            message = args.reasoning_budget_message
            budget = prompts.given_thinking(args)
            thoughts = loading.template.form.limit(budget, asked.text, message)
        request = _request(args, tokens, thoughts, loading.file.metadata)
        loading.prepare(request)
        engine = Engine(loading)
    with engine:
        if args.verbose:
            print_engine(engine)
        generation = engine.generation(request)
        interrupted, text = _stream(generation, quiet=args.json)
    if args.json:
        report = {"text": text, "statistics": statistics_dict(generation.statistics)}
        print(json.dumps(report, ensure_ascii=False))
    end_note(generation.statistics, engine.session.context)
    if args.show_timings:
        print_statistics(generation.statistics)
    return 130 if interrupted else 0


def _request(
    args: argparse.Namespace,
    prompt: list[int],
    thoughts: ThoughtLimit | None,
    metadata: Mapping[str, Any],
) -> Request:
    from urdir.model.engine.requests.request import Request

    return Request(
        prompt=tuple(prompt),
        settings=options.sampling_settings(args, metadata=metadata),
        limit=args.n_predict,
        stops=tuple(args.stop),
        ignore_end=args.ignore_eos,
        thoughts=thoughts,
    )


def _rendered(
    template: ChatTemplate, system: str | None, prompt: str, variables: Mapping[str, Any]
) -> Prompt:
    """A conversation's first turn."""
    from urdir.model.text.chat import Message

    turns = [Message("system", system)] if system else []
    return template.render([*turns, Message("user", prompt)], variables=variables)


def _stream(generation: Generation, quiet: bool) -> tuple[bool, str]:
    """Print the text as it comes; (interrupted, all of it)."""
    pieces: list[str] = []
    interrupted = False
    try:
        with closing(generation.text()) as made:
            for piece in until_first("prompt", made):
                pieces.append(piece)
                if not quiet:
                    sys.stdout.write(shown(piece))
                    sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return interrupted, "".join(pieces)
