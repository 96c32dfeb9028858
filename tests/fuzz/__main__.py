"""Mutated input for what reads files, templates, requests and PTX; run from the repository's root.

    PYTHONPATH=.src python -m tests.fuzz                         every target, 2000 inputs each
    PYTHONPATH=.src python -m tests.fuzz gguf --count 1000000 --seed 7 --jobs 2
    PYTHONPATH=.src python -m tests.fuzz gguf --seed 7 --only 4711        one input again

Input number n of a seed is the same everywhere, however many processes there are. A finding is an
exception that is not the project's own, a process that dies, an input that takes longer than --time
(of the processor), or more memory than ten times its size and --memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz import worker
from tests.fuzz.targets import TARGETS
from urdir.model.progress import Progress

_SHOWN = 3  # findings that read the same
_BATCH = 10_000  # inputs of a process; what one leaves behind is gone with it
#: Arenas of further threads would reserve 64 MiB each of what is bounded, and a backtrace of a Rust
#: panic, which nobody reads, maps whole libraries.
_ENVIRONMENT = {**os.environ, "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}


def main() -> int:
    """Run the command line; returns the exit code, 1 where there is a finding."""
    args = _parser().parse_args()
    if args.worker:
        worker.take_all(args)
        return 0
    if args.only is not None:
        worker.take_one(args)
        return 0
    return 1 if sum(_Run(name, args).findings for name in args.targets or TARGETS) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="inputs of each target")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each target")
    parser.add_argument("--time", type=float, default=2.0, help="of the processor, for an input")
    parser.add_argument("--memory", type=int, default=32, help="MiB, and ten times the input")
    parser.add_argument("--only", type=int, help="this input alone, with a traceback")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--current", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


class _Run:
    """All inputs of a target, in processes of some each; prints findings and what came of it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name, self._args = name, args
        self._lock = threading.Lock()  # of what follows
        self._outcomes, self._seen = Counter[str](), Counter[str]()
        self._end = time.monotonic() + args.seconds
        started, used = time.monotonic(), _processor_seconds()
        with Progress(name, args.count) as self._progress, ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(self._batch, range(0, args.count, _BATCH)))
        seconds, used = time.monotonic() - started, _processor_seconds() - used
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in self._outcomes.most_common())
        print(
            f"{name}: {self._outcomes.total():,} inputs, seed {args.seed}, {seconds:.0f} s, "
            f"{used:.0f} s of processors: {kinds}",
            flush=True,
        )

    @property
    def findings(self) -> int:
        """How many there were."""
        return self._seen.total()

    def _batch(self, first: int) -> None:
        """The inputs from ``first`` on; after one that ends a process the next begins."""
        end = min(first + _BATCH, self._args.count)
        while first < end and time.monotonic() < self._end:
            first = self._process(first, end)

    def _process(self, first: int, end: int) -> int:
        """Inputs of one process; returns the number of the next."""
        command = [sys.executable, "-m", "tests.fuzz", self._name, "--worker"]
        for option in ("seed", "time", "memory"):
            command += [f"--{option}", str(getattr(self._args, option))]
        command += ["--first", str(first), "--count", str(end - first)]
        command += ["--seconds", str(self._end - time.monotonic())]
        with tempfile.TemporaryFile() as current:
            command += ["--current", str(current.fileno())]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=_ENVIRONMENT, pass_fds=[current.fileno()],
            ) as process:  # fmt: skip
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith(worker.REPORT):
                        report = json.loads(line.removeprefix(worker.REPORT))
                        self._took(report["next"] - first, report["outcomes"])
                        first = report["next"]
                        for what in report["findings"]:
                            self._found(first - 1, what)
            if status := process.returncode:
                number = int.from_bytes(os.pread(current.fileno(), 8, 0), "little")
                self._took(number + 1 - first, {"finding": 1, "unknown": number - first})
                self._found(number, f"died with {status}")
                first = number + 1
        return first

    def _took(self, count: int, outcomes: dict[str, int]) -> None:
        with self._lock:
            self._progress.advance(count)
            self._outcomes.update(outcomes)

    def _found(self, number: int, what: str) -> None:
        with self._lock:
            self._seen[what] += 1
            if self._seen[what] <= _SHOWN:
                print(f"{self._name} --seed {self._args.seed} --only {number}: {what}", flush=True)


def _processor_seconds() -> float:
    """Of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
