"""`urdir run`: one answer, streamed to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from urdir.model.commands import diffused, options, prompts
from urdir.model.commands.chat_input import has_terminal
from urdir.model.commands.opening import answer_options, load
from urdir.model.commands.options import UsageError
from urdir.model.commands.report import end_note, print_engine, print_statistics, statistics_dict
from urdir.model.commands.terminal import shown
from urdir.model.progress import until_first

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.generate import Generation
    from urdir.model.engine.loading import Loading
    from urdir.model.engine.requests.request import Request
    from urdir.model.text.constraints import Constraint
    from urdir.model.text.formats import Format
    from urdir.model.text.thought_limit import ThoughtLimit

EXAMPLES = """\
  urdir run "What is 27 plus 45?"                     the built-in demo model
  urdir run model.gguf "Tell me a story" -n 50        at most 50 tokens of your model
  urdir run -m model.gguf -p "Tell me a story"        the same with llama.cpp's flags
  urdir run -hf org/repo-GGUF:Q8_0 "Hello"            a model on the Hugging Face hub
  urdir run folder --quantize q8_0 "Hello"            safetensors, smaller while loaded
  urdir run model.gguf --gpus 2 "Hello"               a half of the model on each of two GPUs
  urdir run model.gguf                                on a terminal: a conversation
  urdir run model.gguf -j '{}' "A pear, as JSON"      JSON; a schema, or --grammar, says more
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
    groups = ("memory", "prompt", "template", "generation", "text", "format", "run")
    options.add_llama_flags(parser, *groups, "diffusion")
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
    form = prompts.given_format(args)
    if args.raw and (system is not None or template is not None):
        raise UsageError("--raw continues the text: without a system message or a chat template")
    prompt = prompts.given_prompt(args)
    if prompt is None:
        if has_terminal() and not (args.raw or args.json):
            return _chat(args)
        prompt = prompts.read_prompt()
        if not prompt:
            raise UsageError("no prompt: stdin is empty; give it after the model, or with -p TEXT")
    wanted = answer_options(args, chat=not args.raw, chat_template=template)
    with load(wanted) as loading:
        request = _prepared(args, loading, system, prompt, form)
        engine = Engine(loading)
    with engine:
        if args.verbose:
            print_engine(engine)
        if engine.config.diffuses:
            diffused.answer(engine, args, request.prompt)
            return 0
        return _answer(engine, args, request)


def _answer(engine: Engine, args: argparse.Namespace, request: Request) -> int:
    """Print an answer, with what is wanted beside it."""
    generation = engine.generation(request)
    interrupted, text = _stream(generation, quiet=args.json)
    if args.json:
        report = {"text": text, "statistics": statistics_dict(generation.statistics)}
        print(json.dumps(report))
    end_note(generation.statistics, engine.session.context)
    if args.show_timings:
        print_statistics(generation.statistics)
    return 130 if interrupted else 0


def _prepared(
    args: argparse.Namespace,
    loading: Loading,
    system: str | None,
    prompt: str,
    form: Format | None,
) -> Request:
    """The request, whose first steps are recorded if it has steps of its own."""
    config = loading.config
    is_source = config.source is not None
    if is_source and (system is not None or prompts.given_template(args) is not None):
        raise UsageError(
            "an encoder-decoder reads a text: without a system message or a chat template"
        )
    if args.raw or is_source:
        request = _continued(args, loading, prompt, form)
    else:
        request = _answered(args, loading, system, prompt, form)
    if config.diffuses:
        if form is not None:
            raise UsageError("masks are not filled by a grammar or a schema")
    else:
        diffused.check_none(args, config.architecture)
        loading.prepare(request)
    return request


def _chat(args: argparse.Namespace) -> int:
    """Hold a conversation with the same flags: there is a terminal, and no prompt."""
    from urdir.model.commands import chat

    defaults = args.whole("chat").parse(["chat"])
    return chat.run(argparse.Namespace(**{**vars(defaults), **vars(args), "words": []}))


def _continued(
    args: argparse.Namespace, loading: Loading, prompt: str, form: Format | None
) -> Request:
    """The request of a text's continuation."""
    from urdir.model.engine.answer_options import of_whole_answer

    tokens = loading.tokenizer.encode(prompt, parse_special=True, add_bos=True)
    return _request(args, loading, tokens, None, of_whole_answer(form))


def _answered(
    args: argparse.Namespace,
    loading: Loading,
    system: str | None,
    prompt: str,
    form: Format | None,
) -> Request:
    """The request of an answer to a conversation's first turn."""
    from urdir.model.engine.reply import ChatPrompt
    from urdir.model.text.chat import Message

    turns = [Message("system", system)] if system else []
    turns.append(Message("user", prompt))
    variables = prompts.given_variables(args)
    chat = ChatPrompt.of(loading.template, turns, {"variables": variables})
    budget, message = prompts.given_thinking(args), args.reasoning_budget_message
    thoughts = chat.form.limit(budget, chat.rendered.text, message)
    return _request(args, loading, chat.tokens, thoughts, chat.constraint(form))


def _request(
    args: argparse.Namespace,
    loading: Loading,
    tokens: Sequence[int],
    thoughts: ThoughtLimit | None,
    constraint: Constraint | None,
) -> Request:
    from urdir.model.engine.requests.request import Request

    return Request(
        prompt=tuple(tokens),
        settings=options.sampling_settings(args, metadata=loading.file.metadata),
        limit=args.n_predict,
        stops=tuple(args.stop),
        ignore_end=args.ignore_eos,
        constraint=constraint,
        thoughts=thoughts,
    )


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
