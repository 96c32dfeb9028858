"""A server under load for a time, round after round, and what each of its processes holds then.

    PYTHONPATH=.src python -m tests.model.serve.soak --seconds 3600 --warm-up 1200 --api-workers 2

`urdir serve demo` runs on the emulator (``--device``). A round is a minute of load (`soak_load`).
When the server is idle again, a row for every process says its resident memory, open files,
threads, asyncio tasks, and the blocks of kernels that the emulator has compiled. Exit code 1: an
answer was wrong, or something grew (`soak_held.growth`).

    PYTHONPATH=.src python -m tests.model.serve.soak --seconds 600 --warm-up 200 --random-steps

runs no steps: the server's own code alone, with hundreds of times as many requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx

from tests.model.serve.soak_held import LEAST_ROUNDS, SAYS, Round, growth, look, trend
from tests.model.serve.soak_load import CONTEXT, Load
from tests.model.serve.soak_steps import RANDOM_STEPS
from tests.processes import running, start_python
from urdir.model.measure.http_events import HttpServer


@contextlib.contextmanager
def serving(
    device: str, workers: int, folder: Path, random_steps: bool = False, sequences: int = 4
) -> Iterator[tuple[int, HttpServer]]:
    """A server's process and its URL."""
    (folder / "sitecustomize.py").write_text(SAYS + RANDOM_STEPS * random_steps)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    flags = ["-m", "demo", "-dev", device, "-c", str(CONTEXT), "-np", str(sequences)]
    flags += ["--port", "0", "--api-workers", str(workers)]
    log = folder / "stderr"
    with log.open("w") as stderr:
        process = start_python(
            *("-m", "urdir.model", "serve", *flags),
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": path, "URDIR_SOAK_DIR": str(folder)},
        )
    with running(process):
        while (found := re.search(r"http://\S+\d", log.read_text())) is None:
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        yield process.pid, HttpServer.parse(found[0])
        process.send_signal(signal.SIGTERM)
        if process.wait(600):
            raise RuntimeError(f"exit code {process.returncode}: {log.read_text()}")


async def _metrics(server: HttpServer) -> dict[str, float]:
    url = f"http://{server.host}:{server.port}/metrics"
    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
        reply = await http.get(url)
    lines = [line.rpartition(" ") for line in reply.text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in lines}


async def idle(server: HttpServer, seconds: float = 600) -> dict[str, float]:
    """The metrics once nothing runs, or as they are after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        with suppress(httpx.HTTPError, KeyError):
            now = await _metrics(server)
            if not now["urdir_running"] + now["urdir_queued"] or time.monotonic() > end:
                return now
        await asyncio.sleep(0.2)


async def settle(server: HttpServer, seconds: float) -> None:
    """Wait until the model is loaded and the graphs that are recorded in idle time are."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        now = await idle(server, seconds)
        if now["urdir_graphs_recorded"] >= now["urdir_graphs_wanted"]:
            return
        await asyncio.sleep(1)


async def soak(root: int, server: HttpServer, folder: Path, args: argparse.Namespace) -> list[str]:
    """Rounds of load; what was wrong. The first, as long as ``warm_up``, count no growth."""
    begun = time.monotonic()
    end = begun + args.seconds
    await settle(server, args.seconds)
    load, rounds, wrong = Load(server, args.clients, args.random_steps), [], []
    while time.monotonic() < end:
        await load.run(min(args.round, max(end - time.monotonic(), 1)))
        now = await idle(server)
        await asyncio.sleep(2)  # connections are being closed
        seconds = time.monotonic() - begun
        rounds.append(Round(seconds / 3600, look(root, folder)))
        pages = now["urdir_pages_used"]
        graphs = now["urdir_graph_bytes"] / 1e6
        print(f"{seconds:.0f} s, {load.counts.total()} requests, {graphs:.1f} MB of graphs")
        for process, held in rounds[-1].processes.items():
            print(f"  {process}: {held}", flush=True)
        if pages or now["urdir_running"] or now["urdir_queued"]:
            wrong.append(f"round {len(rounds)}: {now}")
    print(dict(load.counts))
    if (busy := load.counts["busy"]) > load.counts.total() / 2:
        wrong.append(f"{busy} requests were refused: the machine has too much to do")
    warm = [each for each in rounds if each.hours * 3600 > args.warm_up]
    for process in warm[-1].processes if len(warm) >= LEAST_ROUNDS else ():
        if all(process in each.processes for each in warm):
            print(f"process {process}: {trend(warm, process)}")
    return [*wrong, *map(str, load.wrong), *growth(warm)]


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--round", type=float, default=60.0, help="seconds of load in a round (60)")
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds without verdict (0)")
    parser.add_argument("--clients", type=int, default=6, help="clients at once (6)")
    parser.add_argument(
        "--random-steps", action="store_true", help="run no steps (see `soak_steps`)"
    )
    parser.add_argument("--api-workers", type=int, default=0, help="as of `urdir serve` (0)")
    parser.add_argument("--device", default="emulator")
    parser.add_argument(
        "--sequences", type=int, default=4, help="few have few shapes of steps to compile (4)"
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="urdir-soak-") as name:
        folder = Path(name)
        steps = args.random_steps, args.sequences
        with serving(args.device, args.api_workers, folder, *steps) as (root, server):
            wrong = asyncio.run(soak(root, server, folder, args))
        stderr = (folder / "stderr").read_text()
    print(stderr[-2000:])
    print(*(wrong or ["nothing grew, nothing was wrong"]), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
