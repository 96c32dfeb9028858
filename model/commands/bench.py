"""`urdir bench`: measured speed, compared with the peak rates of the device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from urdir.model.commands import bench_load, options, values
from urdir.model.commands import bench_report as report
from urdir.model.commands.bench_printers import Printer, print_report, printer
from urdir.model.commands.opening import engine_options, open_device, open_engine
from urdir.model.commands.report import installed_version
from urdir.model.engine.options import MODEL_DRAFTS, NGRAM
from urdir.model.memory.draft_settings import FIRST_TOKENS, DraftSettings
from urdir.model.progress import Progress
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.session import Session
    from urdir.model.families.synthetic import SyntheticModel
    from urdir.model.measure.bench import BenchCase, BenchRow, FailedRow, Rates
    from urdir.model.measure.profile import ProfileRow

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
    options.add_file(parser, optional=True)
    parser.add_argument("--shape", metavar="NAME", help="a model of this shape, random weights")
    parser.add_argument("--type", metavar="TYPE", help="its weights (as published: mostly q4_k_m)")
    options.add_quantize(parser)
    options.add_llama_flags(parser, "model", "memory", "bench")
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
        help="write that profile of decode steps for ui.perfetto.dev, launch by launch",
    )
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
    parser.add_argument(
        "--routing",
        type=values.real_number(0.5, 0.99),
        metavar="SHARE",
        help="rows choose experts at random, the first half of them with this share of all "
        "choices: what a cache of experts is worth (0.9: as published of Qwen3-30B-A3B)",
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


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from urdir.model.measure.plot import check_can_plot

    if args.plot:
        check_can_plot()
    others = (args.kernels, args.startup, args.load, args.mixed, args.embed, args.second_turn)
    if args.trace and any(others):
        raise options.UsageError("--trace: only decode steps of a model are traced")
    if args.load is True:
        wanted = partial(replace, drafts=_drafts(args), draft=_draft_source(args))
        return bench_load.run_here(args, _source(args), wanted)
    if args.load:
        return bench_load.run(args)
    alone = (args.kernels, args.startup, args.profile, args.plot, args.trace)
    if args.gpus is not None and any(alone):
        raise options.UsageError("--gpus: of several GPUs only the speed of a model is measured")
    if args.kernels:
        return _run_kernels(args)
    if args.mixed:
        return _run_mixed(args)
    if args.embed:
        return _run_embed(args)
    if args.second_turn:
        return _run_second_turn(args)
    return _run_startup(args) if args.startup else _run_model(args)


def _run_mixed(args: argparse.Namespace) -> int:
    from urdir.model.measure.mixed import MixedRow, mixed_rows, session_size

    sequences, context = session_size(args.mixed)
    part = report.Section("mixed", report.MIXED_COLUMNS, (MixedRow,))
    return _run_section(
        args, part, context, lambda of: mixed_rows(of, args.mixed), sequences=sequences
    )


def _run_embed(args: argparse.Namespace) -> int:
    from urdir.model.measure.embeddings import EmbedRow, embed_profile, embed_rows
    from urdir.model.measure.profile import ProfileRow

    longest = max(tokens for _, tokens in args.embed)
    wanted = replace(
        engine_options(args, _source(args), longest), chunk=options.chunk(args), embeddings=True
    )
    with open_engine(wanted) as engine:
        encoder, device, rates = engine.encoder, engine.device, _rates(engine.device)
        rows = list(embed_rows(encoder, args.embed, args.repetitions))
        launches = [
            row
            for texts, tokens in (args.embed if args.profile else ())
            for row in embed_profile(encoder, device, texts, tokens, rates.read)
        ]
        made = _conditions(device, engine.name, rates)
    part = report.Section("embeddings", report.EMBED_COLUMNS, (EmbedRow,))
    profiled = report.Section("profile", report.PROFILE_COLUMNS, (ProfileRow,))
    parts: list[tuple[report.Section, Sequence[Any]]] = [(part, rows)]
    parts += [(profiled, launches)] if args.profile else []
    print_report(made, parts, args.output)
    return 0


def _run_second_turn(args: argparse.Namespace) -> int:
    from urdir.model.measure.second_turn import TurnRow, second_turn_context, second_turn_rows

    tokens, repeats = args.second_turn, args.repetitions
    part = report.Section("turns", report.TURN_COLUMNS, (TurnRow,))
    return _run_section(
        *(args, part, second_turn_context(tokens)),
        lambda of: second_turn_rows(of, tokens, repeats),
        sequences=2,
        memory_share=0.9,
        prefix_host_memory=args.prefix_host_memory,
    )


def _run_section(
    args: argparse.Namespace,
    part: report.Section,
    context: int,
    measured: Callable[[Session], Iterable[Any]],
    **session: Any,
) -> int:
    """Print the rows that are ``measured`` of a session with these options."""
    wanted = replace(
        engine_options(args, _source(args), context),
        kv_dtype=args.cache_type_k or "f16",
        value_dtype=args.cache_type_v or "f16",
        chunk=options.chunk(args),
        **session,
    )
    with open_engine(wanted) as engine:
        rows = list(measured(engine.session))
        made = _conditions(engine.device, engine.name, _rates(engine.device), len(engine.group))
    print_report(made, [(part, rows)], args.output)
    return 0


def _run_model(args: argparse.Namespace) -> int:
    from urdir.model.measure.bench import BenchCase, BenchRow, FailedRow
    from urdir.model.measure.profile import ProfileRow, plot_roofline
    from urdir.model.measure.trace import write_trace

    case = BenchCase(
        prompts=args.n_prompt,
        generate=args.n_gen,
        depths=args.n_depth,
        repeats=args.repetitions,
        sequences=args.sequences,
        pairs=tuple(args.pg),
        drafts=_drafts(args),
    )
    width = max((len(test.name) for test in case.tests), default=0)
    kinds = (BenchRow, FailedRow)
    rows = report.Section("rows", report.ROW_COLUMNS, kinds, {**report.ROW_ROOM, "test": width})
    profiled = report.Section("profile", report.PROFILE_COLUMNS, (ProfileRow,))
    has_profile = bool(args.profile or args.plot or args.trace)
    run = _ModelRun(args, printer(args.output, [rows, profiled] if has_profile else [rows]), rows)
    try:
        for part in case.parts():
            run.measure(part, has_profile)
        if run.conditions is not None and has_profile:
            run.printing.add(run.conditions, profiled, run.profile)
    finally:
        run.printing.end()
    if run.conditions is not None and args.plot:
        title = f"decode step of {run.conditions.model} on {run.conditions.device}"
        plot_roofline(run.profile, run.conditions.read_gb_per_s * 1e9, title, args.plot)
    if run.conditions is not None and args.trace:
        write_trace(args.trace, run.trace, f"{run.conditions.model} on {run.conditions.device}")
    return 1 if run.has_failed or (args.falls and _tell_falls(run.rows)) else 0


def _tell_falls(rows: Sequence[BenchRow]) -> bool:
    """Say on stderr where more sequences give fewer tokens/s; whether they do anywhere."""
    from urdir.model.measure.falls import falls

    found = falls(rows)
    for fall in found:
        print(fall, file=sys.stderr)
    return bool(found)


@dataclass(slots=True)
class _ModelRun:
    """Results of one model so far. Each row is printed as soon as it is measured."""

    args: argparse.Namespace
    printing: Printer
    section: report.Section
    rates: Rates | None = None
    conditions: report.Conditions | None = None
    profile: list[ProfileRow] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    rows: list[BenchRow] = field(default_factory=list)
    has_failed: bool = False

    def measure(self, part: BenchCase, has_profile: bool) -> None:
        """Open the model with memory for one part of the tests, and measure them.

        A test that fails becomes a failed row. If the memory is insufficient for a part, all its
        tests become failed rows. Raises ModelError and DriverError if the model cannot be opened
        at all, DriverError if the device is lost."""
        from urdir.driver.errors import DriverError
        from urdir.model.errors import ModelError
        from urdir.model.measure.bench import FailedRow, bench, time_step
        from urdir.model.measure.profile import summarise
        from urdir.model.measure.streaming import LinkUse
        from urdir.model.measure.trace import step_events

        try:
            engine = _open_engine(self.args, part)
        except (DriverError, ModelError) as error:
            if self.conditions is None:
                raise
            self.has_failed = True
            failed = [FailedRow.of(test, error) for test in part.tests]
            self.printing.add(self.conditions, self.section, failed)
            return
        with engine, Progress("measuring", len(part.tests)) as progress:
            rates = self.rates = self.rates or _rates(engine.device)
            link = LinkUse.of(engine.session) if engine.weights.streamed else None
            for row in progress.over(bench(engine.session, engine.file, rates, part)):
                if isinstance(row, FailedRow):
                    self.has_failed = True
                else:
                    self.rows.append(row)
                    if link is not None:
                        progress.note(link.during(row))
                self._note_conditions(engine, rates)
                self._show(row, progress)
            for count in part.sequences if has_profile else ():
                plan, timings = time_step(engine.session, count)
                self.profile += summarise(plan, timings, rates.read, count)
                self.trace += step_events(plan, timings, count, _step_name(count))
            self._note_conditions(engine, rates)

    def _note_conditions(self, engine: Engine, rates: Rates) -> None:
        name = engine.name
        if self.args.lora is not None:
            name += " with {1} LoRA of rank {0}".format(*self.args.lora)
        self.conditions = _conditions(engine.device, name, rates, len(engine.group))

    def _show(self, row: BenchRow | FailedRow, progress: Progress) -> None:
        """Print a row, and a short line on stderr if stdout shows nothing to a person yet."""
        assert self.conditions is not None
        with progress.cleared():
            self.printing.add(self.conditions, self.section, [row])
        if self.args.output == "json" or not sys.stdout.isatty():
            progress.note(_line(row))


def _step_name(sequences: int) -> str:
    return "a decode step" + (f" of {sequences} sequences" if sequences > 1 else "")


def _line(row: BenchRow | FailedRow) -> str:
    """Short text of a row."""
    from urdir.model.measure.bench import FailedRow

    if isinstance(row, FailedRow):
        return f"{row.test}: {row.error}"
    return f"{row.test}: {row.tokens_per_second:.1f} tokens/s"


def _drafts(args: argparse.Namespace) -> DraftSettings | None:
    """Draft settings from --draft and its related flags; None for no drafts."""
    if args.draft is None:
        if args.accept is not None:
            raise options.UsageError("--accept: of which drafts? Give --draft, too")
        return None
    kind, usual = "model", MODEL_DRAFTS
    if args.draft == NGRAM:
        kind, usual = NGRAM, DraftSettings().most
    most, least = args.draft_max or usual, args.draft_min
    if least > most:
        raise options.UsageError(f"--draft-min {least} of --draft-max {most}")
    tokens = args.draft_vocab
    return DraftSettings(kind=kind, most=most, least=least, chance=args.accept, tokens=tokens)


def _draft_source(args: argparse.Namespace) -> str | SyntheticModel | None:
    """Whose drafts steps verify: the file of a draft model, or one of a shape."""
    from urdir.model.families.config import Config
    from urdir.model.families.shapes import SHAPES
    from urdir.model.families.synthetic import SyntheticModel
    from urdir.model.families.synthetic_draft import DRAFT_SHAPES, SyntheticDraft

    draft: str | None = args.draft
    if draft is None or Path(draft).exists():
        return draft
    if draft in SHAPES:
        return SyntheticModel(draft)
    if draft in DRAFT_SHAPES:
        source = _source(args)
        if not isinstance(source, SyntheticModel):
            raise options.UsageError(f"--draft {args.draft}: a shape needs a model of --shape")
        return SyntheticDraft(draft, Config.of(source))
    return draft


def _open_engine(args: argparse.Namespace, part: BenchCase) -> Engine:
    wanted = replace(
        engine_options(args, _source(args), part.context),
        kv_dtype=args.cache_type_k or "f16",
        value_dtype=args.cache_type_v or "f16",
        sequences=part.most_sequences,
        chunk=options.chunk(args),
        drafts=part.drafts,
        draft=_draft_source(args),
    )
    if args.lora is None:
        return open_engine(wanted)
    from urdir.model.measure.made_adapters import load_made_adapters

    rank, count = args.lora
    engine = open_engine(replace(wanted, max_adapters=count, max_adapter_rank=rank))
    load_made_adapters(engine, rank, count)
    return engine


def _run_kernels(args: argparse.Namespace) -> int:
    from urdir.model.measure.kernels import GemvRow, bench_gemv

    with open_device(args) as device:
        rates = _rates(device)
        rows = []
        with Progress("measuring") as progress:
            for row in bench_gemv(device):
                progress.note(f"{row.type} {row.rows} x {row.cols}: {row.share:.1%}")
                rows.append(row)
        conditions = _conditions(device, "matrix-vector products", rates)
    section = report.Section("matvecs", report.GEMV_COLUMNS, (GemvRow,))
    print_report(conditions, [(section, rows)], args.output)
    return 0


def _run_startup(args: argparse.Namespace) -> int:
    from urdir.model.environment import read_environment
    from urdir.model.measure.startup import StartupRow, bench_startup

    environment = read_environment()
    device_name = args.device or environment.device
    with Progress("starting"):
        rows = bench_startup(_source(args), device_name, environment.cache_dir)
    with open_device(args) as device:
        model = args.shape or Path(options.one_model(args) or "the demo model").name
        conditions = _conditions(device, model, _rates(device))
    section = report.Section("startup", report.STARTUP_COLUMNS, (StartupRow,))
    print_report(conditions, [(section, rows)], args.output)
    return 0


def _source(args: argparse.Namespace) -> str | SyntheticModel | None:
    from urdir.model.families.synthetic import SyntheticModel

    model = options.one_model(args)
    if args.shape and model:
        raise options.UsageError(f"--shape {args.shape} beside a model: give one of them")
    return SyntheticModel(args.shape, args.type) if args.shape else model


def _rates(device: Device) -> Rates:
    """Peak rates of the device; warns if they are lower than expected."""
    from urdir.model.measure.bandwidth import doubt, read_bandwidth
    from urdir.model.measure.bench import Rates
    from urdir.model.measure.product_rate import product_rate

    with Progress("measuring the device"):
        rates = Rates(read_bandwidth(device), product_rate(device))
    if device.is_emulated:
        print("no GPU: these are figures of the emulator", file=sys.stderr)
    if reason := doubt(device.properties.name, rates.read):
        print(f"warning: {reason}", file=sys.stderr)
    return rates


def _conditions(device: Device, model: str, rates: Rates, gpus: int = 1) -> report.Conditions:
    """Conditions of the measurement; with several GPUs, rates, memory and traffic are per GPU."""
    free, total = device.memory_info()
    name = device.properties.name
    return report.Conditions(
        model=model,
        device=name if gpus == 1 else f"each of {gpus} x {name}",
        emulated=device.is_emulated,
        driver=".".join(map(str, device.properties.driver_version)),
        version=installed_version("urdir"),
        read_gb_per_s=rates.read / 1e9,
        product_tflop_per_s=rates.product / 1e12,
        vram_bytes=total - free,
    )
