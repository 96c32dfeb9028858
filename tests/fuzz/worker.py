"""One process that takes inputs within limits of time and memory, and reports on them."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.fuzz.targets import ALLOWED, RESERVED, TARGETS, Target

REPORT = "urdir-fuzz "  # before a report, on a line of its own
_EVERY = 100  # inputs of a report without findings
_GIVE_UP = 30  # seconds after which code that cannot be interrupted is ended
_TIMES_SIZE = 10  # bytes of memory for a byte of input


class TooSlow(BaseException):
    """An input takes too long; no `except Exception` catches it."""


def take_all(args: argparse.Namespace) -> None:
    """Inputs from ``args.first`` on; reports after each finding, and now and then."""
    (name,) = args.targets
    with _target(name) as target:
        end = time.monotonic() + args.seconds
        outcomes: Counter[str] = Counter()
        last = args.first + args.count - 1
        for number in range(args.first, last + 1):
            os.pwrite(args.current, number.to_bytes(8, "little"), 0)
            findings = []
            try:
                outcome = _try(target, name, number, args)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                outcome = "finding"
                findings.append(_described(error))
            outcomes[outcome] += 1
            is_last = number == last or time.monotonic() > end
            if findings or is_last or number % _EVERY == 0:
                report = {"next": number + 1, "outcomes": outcomes, "findings": findings}
                print(REPORT + json.dumps(report), flush=True)
                outcomes.clear()
            if is_last:
                break


def take_one(args: argparse.Namespace) -> None:
    """Input ``args.only``, which is also written to a file here; a finding raises."""
    (name,) = args.targets
    with _target(name) as target:
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


@contextlib.contextmanager
def _target(name: str) -> Iterator[Target]:
    """A target whose files are in memory, where the system has such a place."""
    fast = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as folder:
        warnings.simplefilter("ignore")
        yield TARGETS[name](Path(folder))


def _try(target: Target, name: str, number: int, args: argparse.Namespace) -> str:
    """The kind of outcome, where it is one that may be."""
    data = target.make(_rng(name, args.seed, number))
    most = _TIMES_SIZE * len(data) + ((args.memory + RESERVED.get(name, 0)) << 20)
    with _memory_limit(most), _time_limit(args.time):
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


@contextlib.contextmanager
def _memory_limit(nbytes: int) -> Iterator[None]:
    """Bound the address space by what it is now and so much more: MemoryError beyond."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    kept = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, kept)


def _described(error: BaseException) -> str:
    """Kind, message and the innermost places."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[:-5:-1])
    return f"{type(error).__name__}: {str(error)[:200]} [{where}]"
