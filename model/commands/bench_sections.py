"""`urdir bench` of one thing alone: mixed steps, embeddings, second turns, products, the start."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from urdir.model.commands import bench_report as report
from urdir.model.commands import options
from urdir.model.commands.bench_conditions import device_conditions, device_rates, model_source
from urdir.model.commands.bench_printers import print_report
from urdir.model.commands.opening import device_name, engine_options, open_device, open_engine
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.model.engine.session import Session


def run_mixed(args: argparse.Namespace) -> int:
    """Time steps of answers and rows of a prompt together, and each alone."""
    from urdir.model.measure.mixed import MixedRow, mixed_rows, session_size

    sequences, context = session_size(args.mixed)
    part = report.Section("mixed", report.MIXED_COLUMNS, (MixedRow,))
    return _run_section(
        args, part, context, lambda of: mixed_rows(of, args.mixed), sequences=sequences
    )


def run_embed(args: argparse.Namespace) -> int:
    """Time embeddings, with ``--profile`` also the launches of their steps."""
    from urdir.model.measure.embeddings import EmbedRow, embed_profile, embed_rows
    from urdir.model.measure.profile import ProfileRow

    longest = max(tokens for _, tokens in args.embed)
    wanted = replace(
        engine_options(args, model_source(args), longest),
        chunk=options.chunk(args),
        embeddings=True,
    )
    with open_engine(wanted) as engine:
        encoder, device, rates = engine.encoder, engine.device, device_rates(engine.device)
        rows = list(embed_rows(encoder, args.embed, args.repetitions))
        launches = [
            row
            for texts, tokens in (args.embed if args.profile else ())
            for row in embed_profile(encoder, device, texts, tokens, rates.read)
        ]
        made = device_conditions(device, engine.name, rates)
    part = report.Section("embeddings", report.EMBED_COLUMNS, (EmbedRow,))
    profiled = report.Section("profile", report.PROFILE_COLUMNS, (ProfileRow,))
    parts: list[tuple[report.Section, Sequence[Any]]] = [(part, rows)]
    parts += [(profiled, launches)] if args.profile else []
    print_report(made, parts, args.output)
    return 0


def run_second_turn(args: argparse.Namespace) -> int:
    """Time the first token of a prompt, and of the turn that follows it."""
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
        engine_options(args, model_source(args), context),
        kv_dtype=args.cache_type_k or "f16",
        value_dtype=args.cache_type_v or "f16",
        chunk=options.chunk(args),
        **session,
    )
    with open_engine(wanted) as engine:
        rows = list(measured(engine.session))
        made = device_conditions(
            engine.device, engine.name, device_rates(engine.device), len(engine.group)
        )
    print_report(made, [(part, rows)], args.output)
    return 0


def run_kernels(args: argparse.Namespace) -> int:
    """Time single matrix-vector products."""
    from urdir.model.measure.kernels import GemvRow, bench_gemv

    with open_device(args) as device:
        rates = device_rates(device)
        rows = []
        with Progress("measuring") as progress:
            for row in bench_gemv(device):
                progress.note(f"{row.type} {row.rows} x {row.cols}: {row.share:.1%}")
                rows.append(row)
        conditions = device_conditions(device, "matrix-vector products", rates)
    section = report.Section("matvecs", report.GEMV_COLUMNS, (GemvRow,))
    print_report(conditions, [(section, rows)], args.output)
    return 0


def run_startup(args: argparse.Namespace) -> int:
    """Time the parts of the way to the first token."""
    from urdir.model.environment import read_environment
    from urdir.model.measure.startup import StartupRow, bench_startup

    environment = read_environment()
    name = device_name(args, environment)
    rows = []
    with Progress("starting") as progress:
        for row in bench_startup(model_source(args), name, environment.cache_dir):
            progress.note(f"{row.phase}: {row.value:,.1f} {row.unit} {row.note}".rstrip())
            rows.append(row)
    with open_device(args) as device:
        model = args.shape or Path(options.one_model(args) or "the demo model").name
        conditions = device_conditions(device, model, device_rates(device))
    section = report.Section("startup", report.STARTUP_COLUMNS, (StartupRow,))
    print_report(conditions, [(section, rows)], args.output)
    return 0
