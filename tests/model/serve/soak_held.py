"""What the processes of a server hold, and whether that grows."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: As few rounds as can show a trend in a half of them.
LEAST_ROUNDS = 6
#: Of every Python process of the server: says on SIGUSR1 how many asyncio tasks it has, and how
#: many kernels and blocks of kernels (functions of no module) the emulator has compiled.
SAYS = """
import asyncio, gc, os, signal, sys
from pathlib import Path
from types import FunctionType

def say(*_):
    gc.collect()  # what is only garbage is no growth
    objects = gc.get_objects()
    tasks = sum(isinstance(each, asyncio.Task) and not each.done() for each in objects)
    blocks = sum(type(each) is FunctionType and each.__module__ is None for each in objects)
    if (jit := sys.modules.get("urdir.driver.emulator.jit")) is not None:
        blocks += jit._compile.cache_info().misses
    path = Path(os.environ["URDIR_SOAK_DIR"], f"{os.getpid()}.new")
    path.write_text(f"{tasks} {blocks}")
    path.rename(path.with_suffix(".said"))

signal.signal(signal.SIGUSR1, say)
"""
#: What a process may have more of in the last third of the rounds than before: threads and pipes
#: are made as they are needed, up to limits.
MORE = {"files": 4, "threads": 4, "tasks": 2}
#: By how many bytes the largest process, the engine's, and others may grow in the last half.
ENGINE_BYTES, OTHER_BYTES = 12 << 20, 4 << 20


def children(root: int) -> list[int]:
    """The processes below ``root``, it included."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            parents.setdefault(int(parent), []).append(int(folder.name))
    found = [root]
    for process in found:
        found += parents.get(process, ())
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds, and how many kernels and blocks of them the emulator has compiled in
    it; None where it does not say."""

    bytes: int
    files: int
    threads: int
    tasks: int | None
    blocks: int | None = None

    @classmethod
    def of(cls, process: int, said: Path) -> Held:
        """Of a process that said two of these in a file. OSError if it has ended."""
        folder = Path(f"/proc/{process}")
        tasks, blocks = map(int, said.read_text().split()) if said.exists() else (None, None)
        return cls(
            int((folder / "statm").read_text().split()[1]) * resource.getpagesize(),
            len([*(folder / "fd").iterdir()]),
            len([*(folder / "task").iterdir()]),
            tasks,
            blocks,
        )

    def __str__(self) -> str:
        known = f"{self.bytes / 1e6:.1f} MB {self.files} files {self.threads} threads"
        return known if self.tasks is None else f"{known} {self.tasks} tasks {self.blocks} blocks"


def _handles(process: int) -> bool:
    """Whether a process handles SIGUSR1, which ends others."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"SigCgt:\s*(\w+)", status)
    return found is not None and bool(int(found[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def look(root: int, folder: Path) -> dict[int, Held]:
    """What each process of a server holds."""
    processes = children(root)
    asked = []
    for process in processes:
        with suppress(OSError):
            if _handles(process):
                (folder / f"{process}.said").unlink(missing_ok=True)
                os.kill(process, signal.SIGUSR1)
                asked.append(folder / f"{process}.said")
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(path.exists() for path in asked):
        time.sleep(0.1)
    found = {}
    for process in processes:
        with suppress(OSError):
            found[process] = Held.of(process, folder / f"{process}.said")
    return found


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through values: its slope an hour, with the standard error of that."""

    slope: float
    error: float

    @classmethod
    def of(cls, hours: Sequence[float], values: Sequence[float], counts: Sequence[float]) -> Trend:
        """By least squares, where each of ``counts`` adds a number of its own to a value. The error
        is infinite if the values cannot tell."""
        columns = [np.ones(len(hours)), np.array(hours) - np.mean(hours)]
        if len({*counts}) > 1:
            columns.append(np.array(counts) - np.mean(counts))
        x, y = np.stack(columns, 1), np.array(values) - np.mean(values)
        free = len(x) - len(columns)
        if free <= 0 or np.linalg.matrix_rank(x) < len(columns):
            return cls(0.0, float("inf"))
        found = np.linalg.inv(x.T @ x)
        fit = found @ x.T @ y
        left = y - x @ fit
        return cls(float(fit[1]), float(np.sqrt(left @ left / free * found[1, 1])))

    def __str__(self) -> str:
        return f"{self.slope / 1e6:+.1f} MB an hour, give or take {self.error / 1e6:.1f}"


@dataclass(frozen=True, slots=True)
class Round:
    """What each process holds, so many hours after the first look."""

    hours: float
    processes: dict[int, Held]


def trend(rounds: Sequence[Round], process: int) -> Trend:
    """How the memory of a process changes in the last half of the rounds, apart from what the
    emulator keeps: each block of a kernel that it compiles takes some memory. (That blocks go with
    their kernels is tested with the emulator.)"""
    half = rounds[len(rounds) // 2 :]
    held = [each.processes[process] for each in half]
    blocks = [each.blocks or 0 for each in held]
    return Trend.of([each.hours for each in half], [each.bytes for each in held], blocks)


def growth(rounds: Sequence[Round]) -> list[str]:
    """What grew, of processes that were there in all rounds: of which more was held in the last
    third, or memory, surely (by two standard errors), in the last half; and where memory may have
    grown by twice as much, as far as the rounds can tell."""
    if len(rounds) < LEAST_ROUNDS:
        return [f"{len(rounds)} rounds say nothing: {LEAST_ROUNDS} are needed"]
    late, found = len(rounds) * 2 // 3, []
    last = rounds[-1].processes
    engine = max(last, key=lambda process: last[process].bytes)
    for process in set.intersection(*(set(each.processes) for each in rounds)):
        for name, most in MORE.items():
            values = [getattr(each.processes[process], name) or 0 for each in rounds]
            before, after = max(values[:late]), max(values[late:])
            if after - before > most:
                found.append(f"process {process}: {before:,} {name}, then {after:,}")
        line = trend(rounds, process)
        hours = rounds[-1].hours - rounds[len(rounds) // 2].hours
        most = ENGINE_BYTES if process == engine else OTHER_BYTES
        if (line.slope - 2 * line.error) * hours > most:
            found.append(f"process {process}: {line}")
        elif (line.slope + 2 * line.error) * hours > 2 * most:
            found.append(f"process {process}: no verdict, {line}")
    return found
