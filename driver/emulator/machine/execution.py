"""Execution of a launch: its waves of CTAs in sequence."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from urdir.driver.emulator.machine.arithmetic import underflow
from urdir.driver.emulator.machine.compile import Program
from urdir.driver.emulator.machine.memory import Memory
from urdir.driver.emulator.machine.watch import Watch
from urdir.driver.emulator.machine.wave import Wave
from urdir.driver.emulator.machine.wave_run import Status, WaveRun
from urdir.ptxgen.ptx.architecture import occupancy

__all__ = ["DEFAULT_BUDGET", "GridExecution", "Status"]

Extent = tuple[int, int, int]

#: Maximum number of instructions of a launch, counted per group.
DEFAULT_BUDGET = 10_000_000

#: Programs that keep their register files for later launches, 1 to 2 MB each.
KEPT_WAVES = 128

#: Those programs, the one that ran last at the end.
_recent: OrderedDict[Program, None] = OrderedDict()
#: Held while waves and their arenas are taken or kept: drivers of a process share programs.
_waves_lock = threading.Lock()


def _keep(program: Program, key: object, wave: Wave) -> None:
    """Keep a wave for the next launch of its program, and forget those of the oldest program."""
    with _waves_lock:
        program.idle.setdefault(key, []).append(wave)
        _recent[program] = None
        _recent.move_to_end(program)
        if len(_recent) > KEPT_WAVES:
            oldest = _recent.popitem(last=False)[0].idle
            for waves in oldest.values():
                for each in waves:
                    each.forget()
            oldest.clear()


class GridExecution:
    """One launch of a program. ``run`` again after YIELDED or DEPENDENCY_WAIT.

    ``params`` is the parameter block as laid out by ``program.param_layout``; ``shared_bytes``
    counts dynamic shared memory; ``symbols`` are the addresses of module-level variables; ``watch``
    receives the kernel's events.
    """

    def __init__(
        self,
        program: Program,
        grid: Extent,
        block: Extent,
        cluster: Extent,
        shared_bytes: int,
        params: bytes,
        memory: Memory,
        sm_count: int,
        *,
        symbols: Mapping[str, int] | None = None,
        budget: int = DEFAULT_BUDGET,
        dependencies_pending: bool = False,
        watch: Watch | None = None,
    ) -> None:
        if len(params) < program.param_bytes:
            raise ValueError(
                f"kernel {program.name} takes {program.param_bytes} bytes of parameters, "
                f"not {len(params)}"
            )
        self.program = program if watch is None else program.watched
        self.watch = watch
        self.grid = grid
        self.block = block
        self.cluster = cluster
        self.shared_bytes = program.static_shared_bytes + shared_bytes
        self.params = params
        self.memory = memory
        self.sm_count = sm_count
        self.symbols = symbols or {}
        self.budget = budget
        self.dependencies_pending = dependencies_pending
        self.spent = 0
        threads = block[0] * block[1] * block[2]
        self._total = grid[0] * grid[1] * grid[2]
        # The emulator allocates no registers.
        held = occupancy(program.target, 0, threads, self.shared_bytes).ctas
        size = cluster[0] * cluster[1] * cluster[2]
        self._ctas_at_once = max(1, held * sm_count // size) * size
        self._next_cta = 0
        self._run: WaveRun | None = None
        self._done = False
        if watch is not None:
            watch.begin(self)

    def release_dependencies(self) -> None:
        """Mark the preceding kernels as complete."""
        self.dependencies_pending = False

    def run(self, alone: bool = False) -> Status:
        """Run as far as possible; raises KernelFault.

        A grid whose threads all wait for memory that none of them changes is YIELDED, or a deadlock
        (KernelFault) if it is ``alone``: nothing else can run.
        """
        if self._done:
            return Status.DONE
        with np.errstate(all="ignore", under="call", call=underflow):
            while True:
                if self._run is None:
                    self._run = self._next_wave()
                    if self._run is None:
                        self._done = True
                        return Status.DONE
                status = self._run.run(alone)
                if status is not Status.DONE:
                    return status
                wave = self._run.wave
                wave.end()
                if self.watch is None:
                    _keep(self.program, self._key, wave)
                self._run = None

    def waits_for(self) -> str:
        """The instructions at which spinning or waiting groups are, for messages."""
        return self._run.waits() if self._run else ""

    def _next_wave(self) -> WaveRun | None:
        ctas = min(self._ctas_at_once, self._total - self._next_cta)
        if ctas <= 0:
            return None
        self._key = (ctas, self.block, self.cluster, self.shared_bytes)
        with _waves_lock:
            idle = self.program.idle.setdefault(self._key, [])
            wave = next((w for w in idle if w.arena.is_free), None)
            if wave is None:
                wave = Wave(self.program, *self._key, watch=self.watch)
            else:
                idle.remove(wave)
            wave.arena.take(self)
        wave.begin(self.memory, self.params, self.symbols)
        if self.watch is not None:
            self.watch.begin_wave(wave, self._next_cta)
        wave.set_ctas(self._next_cta, self.grid, self.sm_count)
        run = WaveRun(self, wave, self._next_cta)
        self._next_cta += ctas
        return run
