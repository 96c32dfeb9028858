"""`urdir bench --load`: a server under load."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from typing import TYPE_CHECKING

from urdir.model.commands import bench_report as report
from urdir.model.commands import values
from urdir.model.commands.report import installed_version
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.model.measure.http_events import HttpServer
    from urdir.model.measure.load import LoadCase, Reply


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What --load sends."""
    group = parser.add_argument_group("with --load")
    count = values.whole_number(1)
    group.add_argument("--requests", type=count, default=100, metavar="N", help="in all (100)")
    group.add_argument(
        "--input", type=_lengths, default=(512, 512), metavar="N[-N]", help="prompt tokens (512)"
    )
    group.add_argument(
        "--answer", type=_lengths, default=(128, 128), metavar="N[-N]", help="answer tokens (128)"
    )
    group.add_argument(
        "--shared",
        type=values.whole_number(0),
        default=0,
        metavar="N",
        help="tokens that all prompts begin with (0)",
    )
    arrivals = group.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--rate",
        type=values.real_number(1e-3),
        metavar="R",
        help="requests a second, at random times, however many are open",
    )
    arrivals.add_argument(
        "--users", type=count, default=8, metavar="N", help="who ask one after another (8)"
    )
    group.add_argument("--api-key", metavar="KEY", help="that the server asks for")
    group.add_argument(
        "-s", "--seed", type=values.whole_number(0), default=0, metavar="N", help="(0)"
    )


def _lengths(text: str) -> tuple[int, int]:
    """An argparse type: a number of tokens, or a range that they are drawn from."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens and no range of them")
    return low, high


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a request failed."""
    from urdir.model.measure.http_events import HttpServer
    from urdir.model.measure.load import LoadCase, plot_load, summarise

    case = LoadCase(
        requests=args.requests,
        inputs=args.input,
        outputs=args.answer,
        shared=args.shared,
        rate=args.rate,
        users=args.users,
        seed=args.seed,
    )
    model, replies = asyncio.run(_measure(HttpServer.parse(args.load, args.api_key), case))
    throughput, latencies = summarise(replies)
    if failed := [reply for reply in replies if reply.error is not None]:
        print(f"{len(failed)} requests failed, one so: {failed[0].error}", file=sys.stderr)
    arrivals = f"{case.users} users" if case.rate is None else f"{case.rate:g} requests/s"
    conditions = report.LoadConditions(
        model=model,
        server=args.load,
        arrivals=arrivals,
        input="-".join(map(str, dict.fromkeys(case.inputs))),
        answer="-".join(map(str, dict.fromkeys(case.outputs))),
        shared=case.shared,
        version=installed_version("urdir"),
    )
    sections = [
        report.Section("load", [throughput], report.LOAD_COLUMNS),
        report.Section("latency", latencies, report.LATENCY_COLUMNS),
    ]
    report.print_report(conditions, sections, args.output)
    if args.plot:
        plot_load(replies, f"{model}: {conditions.heading[1]}", args.plot)
    return 1 if failed else 0


async def _measure(server: HttpServer, case: LoadCase) -> tuple[str, list[Reply]]:
    """The model's name, and what came of the requests."""
    from urdir.model.measure.load import plan_load, run_load, server_model

    model, vocabulary = await server_model(server)
    planned = plan_load(case, vocabulary)
    with Progress("requests", case.requests) as progress:
        replies = await run_load(server, model, case, planned, lambda _: progress.advance())
    return model, replies
