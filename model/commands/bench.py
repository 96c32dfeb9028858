"""`urdir bench`: measured speed, compared with the peak rates of the device."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from urdir.model.commands import bench_load, bench_sections, options, values
from urdir.model.commands.bench_conditions import draft_settings, draft_source, model_source
from urdir.model.commands.bench_model import run_model
from urdir.model.engine.options import MODEL_DRAFTS
from urdir.model.memory.draft_settings import FIRST_TOKENS, DraftSettings
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS

EXAMPLES = """\
  urdir bench model.gguf                     512 prompt tokens, 128 decoded, five runs each
  urdir bench -m model.gguf -p 32,128-512*2 -n 0   prompts of several lengths
  urdir bench model.gguf -p 0 -n 64 -d 0,256     decoding at once and after 256 tokens of context
  urdir bench model.gguf -p 0 -npl 1,8,16-256*2  decoding by several sequences at once
  urdir bench model.gguf -p 0 -npl 1-16,24,32 --falls   where more sequences give fewer tokens/s
  urdir bench model.gguf -p 0 --draft ngram --draft-max 3 --draft-min 3 --accept 0.7
  urdir bench --shape llama-3.1-8b -p 0 --draft llama-3.2-1b --accept 0.75   a draft model
  urdir bench --shape llama-3.1-8b --type q8_0   no file: random weights of a real shape
  urdir bench model.gguf -p 0 -npl 1,32 --lora 16x8   each sequence with one of eight adapters
  urdir bench model.gguf --gpus 2            a half of the model on each of two GPUs
  urdir bench model.gguf --profile --plot roofline.png   where the time of a decode step goes
  urdir bench model.gguf --profile --trace out.json   the same launch by launch, for Perfetto
  urdir bench --kernels -o csv               single matrix-vector products
  urdir bench model.gguf --mixed 64,512 --mixed 256,512   prompts beside answers, and each alone
  urdir bench --shape bge-large --embed 512,128 --embed 1,32   embeddings of many texts, of one
  urdir bench model.gguf --second-turn 8000  first token of a turn whose beginning is cached
  urdir bench model.gguf --startup           compiling, loading, first token
  urdir bench --load http://127.0.0.1:8080 --users 64 --input 500 --answer 100-300
  urdir bench --load http://127.0.0.1:8080 --rate 20 --requests 1200 --plot load.png
  urdir bench model.gguf --load --at-once --requests 1000 --input 128   no server: its engine alone
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "bench", run, "measure prompt and decode speed", EXAMPLES
    )
    options.add_file(parser)
    parser.add_argument("--shape", metavar="NAME", help="a model of this shape, random weights")
    parser.add_argument(
        "--type", type=str.lower, metavar="TYPE", help="its weights (as published: mostly q4_k_m)"
    )
    options.add_quantize(parser)
    options.add_llama_flags(parser, "model", "memory", "bench")
    _add_other_measurements(parser)
    _add_reports(parser)
    _add_drafts(parser)
    parser.add_argument(
        "--routing",
        type=values.routing,
        metavar="SHARE|locality",
        help="rows choose experts at random: independently, the first half of them with this share "
        "of all choices (0.9: as published of Qwen3-30B-A3B), or with the temporal locality of "
        "traces of that model: what a cache of experts is worth",
    )
    parser.add_argument(
        "--lora",
        type=values.rank_and_count,
        metavar="RANK[xCOUNT]",
        help="LoRA adapters of random values and that rank on all products; each sequence has one "
        "(16x8)",
    )
    options.add_device(parser)
    options.add_gpus(parser)
    options.add_placement(parser)
    options.add_prompt_arithmetic(parser)
    bench_load.add_arguments(parser)


def _add_other_measurements(parser: argparse.ArgumentParser) -> None:
    """What is measured in place of a model's prompts and steps."""
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--kernels", action="store_true", help="time matrix-vector products instead of a model"
    )
    instead.add_argument(
        "--startup", action="store_true", help="time the way to the first token instead"
    )
    instead.add_argument(
        "--load",
        nargs="?",
        const=True,
        choices=values.Urls(),
        metavar="URL",
        help="measure many requests to a server that speaks OpenAI's protocol instead; without a "
        "URL, to the model in this process",
    )
    instead.add_argument(
        "--mixed",
        action="append",
        type=values.number_pair,
        metavar="N,P",
        help="time steps of N answers and P rows of a prompt, and of each alone, instead; "
        "repeatable",
    )
    instead.add_argument(
        "--embed",
        action="append",
        type=values.number_pair,
        metavar="N,L",
        help="time embeddings of N texts of L tokens instead; repeatable",
    )
    instead.add_argument(
        "--second-turn",
        type=values.whole_number(1),
        metavar="N",
        help="time the first token of a prompt of N tokens, and of the next turn, instead",
    )


def _add_reports(parser: argparse.ArgumentParser) -> None:
    """--profile, --falls, --plot and --trace."""
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also time a decode step launch by launch, of each number of sequences, or with "
        "--embed a step of each",
    )
    parser.add_argument(
        "--falls",
        action="store_true",
        help="also say where more sequences give fewer tokens/s than fewer ones; the exit code is "
        "1 then",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw that profile, or --load"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write that profile of decode steps for ui.perfetto.dev, launch by launch, and the "
        "nodes of all recorded graphs with their ids in Nsight Systems and CUPTI",
    )


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    """--draft, what limits it, and --accept."""
    parser.add_argument(
        "--draft",
        metavar="WHOSE",
        help="steps verify drafts of the next tokens: ngram drafts what followed the last tokens "
        "where they were before; mtp are the model's own heads; a file is a draft model, and with "
        "--shape the name of another one",
    )
    parser.add_argument(
        "--draft-max",
        type=values.whole_number(1, MOST_DRAFTS),
        metavar="N",
        help=f"drafts of a sequence in a step, at most ({DraftSettings().most}; of a model "
        f"{MODEL_DRAFTS})",
    )
    parser.add_argument(
        "--draft-min",
        type=values.whole_number(0, MOST_DRAFTS),
        default=0,
        metavar="N",
        help="drafts of a sequence in a step, at least; else as many as pay (0)",
    )
    parser.add_argument(
        "--draft-vocab",
        type=values.whole_number(0),
        metavar="N",
        help="the model's own heads draft its first N tokens alone (0: all; by default "
        f"{FIRST_TOKENS} of twice as many)",
    )
    parser.add_argument(
        "--accept",
        type=values.real_number(0, 1),
        metavar="P",
        help="accept drafts with this probability whatever they are: the speed of drafts of that "
        "quality, and a wrong text",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from urdir.model.measure.plot import check_can_plot

    if args.plot:
        check_can_plot()
    others = (args.kernels, args.startup, args.load, args.mixed, args.embed, args.second_turn)
    if args.trace and any(others):
        raise options.UsageError("--trace: only decode steps of a model are traced")
    _refuse_extras(args, any(others))
    if args.load is True:
        wanted = partial(replace, drafts=draft_settings(args), draft=draft_source(args))
        return bench_load.run_here(args, model_source(args), wanted)
    if args.load:
        return bench_load.run(args)
    alone = (args.kernels, args.startup, args.profile, args.plot, args.trace)
    if args.gpus is not None and any(alone):
        raise options.UsageError("--gpus: of several GPUs only the speed of a model is measured")
    if args.kernels:
        return bench_sections.run_kernels(args)
    if args.mixed:
        return bench_sections.run_mixed(args)
    if args.embed:
        return bench_sections.run_embed(args)
    if args.second_turn:
        return bench_sections.run_second_turn(args)
    return bench_sections.run_startup(args) if args.startup else run_model(args)


def _refuse_extras(args: argparse.Namespace, is_other: bool) -> None:
    """Refuse flags of decode steps where something else is measured: drafts are known to the load
    of this process, too."""
    if not is_other:
        return
    if args.lora is not None:
        raise options.UsageError("--lora: only the speed of decode steps is measured with adapters")
    if args.load is not True and not (args.draft is args.accept is None):
        name = "--accept" if args.draft is None else "--draft"
        raise options.UsageError(f"{name}: only decode steps, or --load without a URL, have drafts")
