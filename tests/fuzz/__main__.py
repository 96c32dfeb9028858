"""Mutated input for what reads files, templates and PTX; run from the repository's root.

    PYTHONPATH=.src python -m tests.fuzz                         every target, 2000 inputs each
    PYTHONPATH=.src python -m tests.fuzz gguf --count 1000000 --seed 7
    PYTHONPATH=.src python -m tests.fuzz gguf --seed 7 --only 4711        one input again

Input number n of a seed is the same everywhere. A finding is an exception that is not the
project's own, a process that dies, an input that takes longer than --time (of the processor), or
more memory than --memory beyond what the process has at the start. Exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.fuzz.targets import ALLOWED, RESERVED, TARGETS, Target

_SHOWN = 3  # findings that read the same
_BATCH = 5000  # inputs of a process; what one leaves behind is gone with it
_REPORT = "urdir-fuzz "  # before a process's report, on a line of its own
_GIVE_UP = 30  # seconds after which code that cannot be interrupted is ended


class TooSlow(BaseException):
    """An input takes too long; no `except Exception` catches it."""


def main() -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args()
    if args.only is not None or args.worker:
        return _work(args)
    found = 0
    for name in args.targets or TARGETS:
        found += _run(name, args)
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="inputs of each target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each target")
    parser.add_argument("--time", type=float, default=2.0, help="of the processor, for an input")
    parser.add_argument("--memory", type=int, default=256, help="MiB that an input may take")
    parser.add_argument("--only", type=int, help="this input alone, with a traceback")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _run(name: str, args: argparse.Namespace) -> int:
    """All inputs of a target, in processes of some each; returns how many findings there were."""
    started, done, outcomes, findings = time.monotonic(), 0, Counter[str](), Counter[str]()
    while done < args.count and time.monotonic() - started < args.seconds:
        count = min(_BATCH, args.count - done)
        command = [sys.executable, "-m", "tests.fuzz", name, "--worker", "--first", str(done)]
        for option in ("seed", "time", "memory"):
            command += [f"--{option}", str(getattr(args, option))]
        command += ["--count", str(count)]
        left = args.seconds - (time.monotonic() - started)
        command += ["--seconds", str(left)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        reached = done
        for line in worker.stdout:
            if not line.startswith(_REPORT):
                continue
            report = json.loads(line.removeprefix(_REPORT))
            reached = report["next"]
            outcomes.update(report["outcomes"])
            for what in report["findings"]:
                findings[what] += 1
                if findings[what] <= _SHOWN:
                    print(f"{name} --seed {args.seed} --only {reached - 1}: {what}", flush=True)
        if worker.wait():
            findings[f"died with {worker.returncode}"] += 1
            print(f"{name} --seed {args.seed} --only {reached}: died with {worker.returncode}")
            reached += 1
        done = max(reached, done + 1)
    seconds = time.monotonic() - started
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in outcomes.most_common())
    print(f"{name}: {done:,} inputs, seed {args.seed}, {seconds:.0f} s: {kinds}", flush=True)
    return sum(findings.values())


def _work(args: argparse.Namespace) -> int:
    """Some inputs in this process; reports after each finding, and now and then."""
    (name,) = args.targets
    fast = Path("/dev/shm")  # in memory, where the system has such a place
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as folder:
        target = TARGETS[name](Path(folder))
        warnings.simplefilter("ignore")
        if args.only is not None:
            return _again(target, name, args)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where Rust writes panics
        _limit_memory(args.memory + RESERVED.get(name, 0))
        _take_all(target, name, args)
    return 0


def _take_all(target: Target, name: str, args: argparse.Namespace) -> None:
    end = time.monotonic() + args.seconds
    outcomes: Counter[str] = Counter()
    for number in range(args.first, args.first + args.count):
        findings = []
        try:
            outcome = _try(target, name, number, args)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "finding"
            findings.append(_described(error))
        outcomes[outcome] += 1
        last = number + 1 == args.first + args.count or time.monotonic() > end
        if findings or last or number % 50 == 49:
            report = {"next": number + 1, "outcomes": outcomes, "findings": findings}
            print(_REPORT + json.dumps(report), flush=True)
            outcomes.clear()
        if last:
            break


def _again(target: Target, name: str, args: argparse.Namespace) -> int:
    data = target.make(_rng(name, args.seed, args.only))
    Path(f"fuzz-{name}-{args.seed}-{args.only}.bin").write_bytes(data)
    started = time.perf_counter()
    try:
        with _time_limit(args.time):
            target.take(data)
        print("taken")
    except ALLOWED as error:
        print(f"{type(error).__name__}: {error}")
    print(f"{time.perf_counter() - started:.3f} s")
    return 0


def _try(target: Target, name: str, number: int, args: argparse.Namespace) -> str:
    """The kind of outcome, where it is one that may be."""
    data = target.make(_rng(name, args.seed, number))
    with _time_limit(args.time):
        try:
            target.take(data)
            return "taken"
        except ALLOWED as error:
            if not str(error) or any(c in str(error) for c in "\x1b\0\r"):
                raise AssertionError(f"message {str(error)!r}") from None
            return type(error).__name__


def _rng(name: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{name} {seed} {number}")


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end(signal_number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"longer than {seconds:g} s")

    faulthandler.dump_traceback_later(_GIVE_UP, exit=True)
    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()


def _limit_memory(mebibytes: int) -> None:
    """Bound the address space by what it is now and so much more: MemoryError beyond."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _described(error: BaseException) -> str:
    """Kind, message and the innermost places."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[:-5:-1])
    return f"{type(error).__name__}: {str(error)[:200]} [{where}]"


if __name__ == "__main__":
    sys.exit(main())
