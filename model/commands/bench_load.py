"""`urdir bench --load`: load test of a server, or of a model in this process."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from urdir.model.commands import bench_report as report
from urdir.model.commands import options, values
from urdir.model.commands.bench_printers import print_report
from urdir.model.commands.opening import begin_warm_up, load, service_options
from urdir.model.commands.report import installed_version
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.model.engine.batch import ShapeBuckets
    from urdir.model.engine.loading import Loading
    from urdir.model.engine.options import EngineOptions
    from urdir.model.engine.requests.limits import Limits
    from urdir.model.families.synthetic import SyntheticModel
    from urdir.model.measure.http_events import HttpServer
    from urdir.model.measure.load import Lengths, LoadCase, Reply
    from urdir.model.measure.load_engine import DeviceUse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of --load."""
    group = parser.add_argument_group("with --load")
    count = values.whole_number(1)
    group.add_argument("--requests", type=count, default=100, metavar="N", help="in all (100)")
    group.add_argument(
        "--input",
        type=_lengths,
        default="512",
        metavar="N[-N|~D]",
        help="prompt tokens: as many, from a range, or by a mean and its deviation (512)",
    )
    group.add_argument(
        "--answer", type=_lengths, default="128", metavar="N[-N|~D]", help="the same (128)"
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
    arrivals.add_argument(
        "--at-once",
        action="store_true",
        help="all of them are there from the start: throughput, whatever each has to wait",
    )
    options.add_many(group)
    group.add_argument("--api-key", metavar="KEY", help="that the server asks for")
    group.add_argument(
        "-s", "--seed", type=values.whole_number(0), default=0, metavar="N", help="(0)"
    )


def _lengths(text: str) -> Lengths:
    """An argparse type: a number of tokens, a range, or a mean and a deviation."""
    from urdir.model.measure.load import Lengths

    if match := re.fullmatch(r"(\d+)~(\d+)", text):
        mean, deviation = int(match[1]), int(match[2])
        if 1 <= deviation <= mean:
            return Lengths.around(mean, deviation)
    elif match := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high:
            return Lengths(low, high)
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a count of tokens nor a range, 10-20, nor a mean and a deviation, "
        "780~340"
    )


def run(args: argparse.Namespace) -> int:
    """Measure a server and print; 1 if a request failed."""
    from urdir.model.measure.http_events import HttpServer

    case = _case(args)
    model, replies = asyncio.run(_measure(HttpServer.parse(args.load, args.api_key), case))
    return _report(args, case, model, args.load, replies)


def run_here(
    args: argparse.Namespace,
    source: str | SyntheticModel | None,
    changed: Callable[[EngineOptions], EngineOptions],
) -> int:
    """Measure a model in this process, with its options ``changed``, and print; 1 if a request
    failed."""
    from urdir.model.engine.engine import Engine
    from urdir.model.measure.load import plan_load
    from urdir.model.measure.load_engine import load_engine

    case = _case(args)
    wanted = changed(service_options(args, source, _context(case)))
    with load(wanted) as loading:
        limits = _limits(args, loading.shapes)
        _warm_up(loading, limits, case)
        engine = Engine(loading)
    device = engine.device
    asks = plan_load(case, engine.config.vocab_size)
    with Progress("requests", case.requests) as progress:
        measured = load_engine(engine, limits, case, asks, lambda _: progress.advance())
        replies, use = asyncio.run(measured)
    section = report.Section("device", report.DEVICE_COLUMNS, (type(use),))
    return _report(args, case, engine.name, device.properties.name, replies, (section, [use]))


def _case(args: argparse.Namespace) -> LoadCase:
    from urdir.model.measure.load import LoadCase

    return LoadCase(
        requests=args.requests,
        inputs=args.input,
        outputs=args.answer,
        shared=args.shared,
        rate=args.rate,
        users=args.requests if args.at_once else args.users,
        seed=args.seed,
    )


def _context(case: LoadCase) -> int | None:
    """Context of the longest request; None if the default of a server is long enough."""
    from urdir.model.engine.options import LONG_CONTEXT

    longest = case.inputs.high + case.outputs.high
    return longest if longest > LONG_CONTEXT else None


def _limits(args: argparse.Namespace, shapes: ShapeBuckets) -> Limits:
    from urdir.model.engine.requests.limits import Limits

    if args.at_once:
        return Limits.for_throughput(shapes, args.requests)
    return Limits.for_latency(shapes)


def _warm_up(loading: Loading, limits: Limits, case: LoadCase) -> None:
    """Warm up, so that the measurement is of a server in steady state."""
    from urdir.model.engine.batch import Output

    if not loading.device.is_emulated:
        print("steps that are likely are recorded first", file=sys.stderr)
    users = case.users if case.rate is None else case.requests
    most = users, case.inputs.high + case.outputs.high
    outputs, rows = (Output.GREEDY,), limits.mixed_rows
    begin_warm_up(loading, float("inf"), outputs=outputs, mixed_rows=rows, most=most)


def _report(
    args: argparse.Namespace,
    case: LoadCase,
    model: str,
    where: str,
    replies: Sequence[Reply],
    *more: tuple[report.Section, list[DeviceUse]],
) -> int:
    """Print the results of the requests; 1 if one failed."""
    from urdir.model.measure.load import Latency, Throughput, plot_load, summarise

    throughput, latencies = summarise(replies)
    if failed := [reply for reply in replies if reply.error is not None]:
        print(f"{len(failed)} requests failed, one so: {failed[0].error}", file=sys.stderr)
    arrivals = f"{case.users} users" if case.rate is None else f"{case.rate:g} requests/s"
    conditions = report.LoadConditions(
        model=model,
        server=where,
        arrivals="all at once" if args.at_once else arrivals,
        input=str(case.inputs),
        answer=str(case.outputs),
        shared=case.shared,
        version=installed_version("urdir"),
    )
    load = report.Section("load", report.LOAD_COLUMNS, (Throughput,))
    latency = report.Section("latency", report.LATENCY_COLUMNS, (Latency,))
    print_report(conditions, [(load, [throughput]), (latency, latencies), *more], args.output)
    if args.plot:
        plot_load(replies, f"{model}: {conditions.heading[1]}", args.plot)
    return 1 if failed else 0


async def _measure(server: HttpServer, case: LoadCase) -> tuple[str, list[Reply]]:
    """The model's name, and the replies to the requests."""
    from urdir.model.measure.load import plan_load, run_load
    from urdir.model.measure.load_server import ask_server, server_model

    async with server:
        model, vocabulary = await server_model(server)
        ask = partial(ask_server, server, model)
        with Progress("requests", case.requests) as progress:
            asks = plan_load(case, vocabulary)
            return model, await run_load(ask, case, asks, lambda _: progress.advance())
