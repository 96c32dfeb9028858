"""Streams as queues of tasks that run only when something waits for them.

Execution is as late as CUDA permits: waiting for a task runs the tasks before it in its queue and
what those wait for. Work of other streams runs only if a needed task spins on it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from urdir.driver.emulator.machine.faults import ILLEGAL_ADDRESS, KernelFault
from urdir.driver.emulator.machine.memory import MemoryRangeError
from urdir.driver.emulator.machine.peer_races import DeviceOrder, Stamps

#: Rounds over everything runnable without the completion of any part, after which it is a deadlock.
#: (Kernels of two streams may legitimately pass a flag back and forth a few times.)
FRUITLESS_ROUNDS = 1000


class Task:
    """Queued work. ``after``: unfinished tasks of other queues that precede it."""

    #: May start before the preceding task is complete (programmatic launch).
    is_programmatic = False
    is_kernel = False
    #: A kernel that triggers its dependents itself, perhaps at its very start.
    triggers_dependents = False
    #: Number of completed parts.
    completed = 0

    def __init__(self) -> None:
        self.done = False
        self.after: tuple[Task, ...] = ()
        self.queue: Queue | None = None
        #: Knowledge of its device at its start and end (`DeviceOrder`).
        self.known: Stamps | None = None
        self.left: Stamps | None = None

    def advance(self) -> bool:
        """Run; False if it spins on another task's work."""
        raise NotImplementedError

    def begin_early(self) -> None:
        """Run until the preceding tasks are needed (programmatic tasks only)."""

    def describe(self) -> str:
        """Description and wait condition, for a deadlock's message."""
        return type(self).__name__


class CallTask(Task):
    """A task that is one function call and never spins."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call

    def advance(self) -> bool:
        """Call it."""
        self._call()
        return True


class Mark(Task):
    """A point of a queue; ``time`` is when it was passed (host clock, seconds)."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def advance(self) -> bool:
        """Take the time."""
        self.time = time.perf_counter()
        return True


@dataclass
class Event:
    """``mark`` is the latest point it was recorded at, None before."""

    flags: int
    mark: Mark | None = None


class Queue:
    """One stream.

    ``is_blocking``: ordered with the legacy default stream; ``is_closed``: destroyed, but pending
    work still runs.
    """

    scheduler: Scheduler

    def __init__(self, is_blocking: bool = True, flags: int = 0, priority: int = 0) -> None:
        self.tasks: deque[Task] = deque()
        self.is_blocking = is_blocking
        self.is_closed = False
        self.flags = flags
        self.priority = priority
        self.last: Task | None = None


class Scheduler:
    """The queues of one context and the rules between them; queue ``legacy`` is stream 0.

    A spinning task may wait for another device, so work of ``all_devices`` runs, whose schedulers
    these are. A fault is reported to the ``poison`` of the device whose work it is.
    """

    def __init__(
        self,
        rng: random.Random,
        all_devices: Sequence[Scheduler],
        poison: Callable[[str, str], None],
    ) -> None:
        self._queues: list[Queue] = []
        self.legacy = self.add_queue(Queue())
        self._rng = rng
        self._all_devices = all_devices
        self._poison = poison
        self._order: DeviceOrder | None = None
        self._device = 0

    def watch_order(self, order: DeviceOrder, device: int) -> None:
        """Report to ``order`` what work of this device, number ``device``, is ordered after."""
        self._order, self._device = order, device

    def add_queue(self, queue: Queue) -> Queue:
        """Register a new stream."""
        queue.scheduler = self
        self._queues.append(queue)
        return queue

    def ends(self) -> list[Task]:
        """The last task of every queue."""
        return [q.last for q in self._queues if q.last is not None]

    def drop(self) -> None:
        """Drop queued work: it never runs, and nothing waits for it."""
        for queue in self._queues:
            for task in queue.tasks:
                task.done = True
            queue.tasks.clear()

    def enqueue(self, queue: Queue, task: Task, after: tuple[Task, ...] = ()) -> Task:
        """Append a task, to run when something waits for it and all of ``after`` is done.

        A task of the legacy stream comes after all work of blocking streams queued before it, and
        before all queued after it (CUDA Driver API, "Stream synchronization behavior").
        """
        if queue is self.legacy:
            self._forget_idle()
            after += tuple(q.last for q in self._queues if q.last and q.is_blocking)
        elif queue.is_blocking and self.legacy.last:
            after += (self.legacy.last,)
        task.after = tuple(t for t in after if not t.done and t.queue is not queue)
        task.queue = queue
        if self._order is not None:
            known = (t.left for t in after if t.left is not None)
            task.known = np.maximum.reduce([self._order.queued(), *known])
        queue.tasks.append(task)
        queue.last = task
        return task

    def finish(self, task: Task) -> None:
        """Run until ``task``, of this context, is done. Raises KernelFault: a kernel's own, or
        LAUNCH_TIMEOUT if no runnable work makes progress.
        """
        fruitless = completed = 0
        while not task.done:
            needed = list(self._needed(task, set()))
            progress = self._run(needed)
            if not progress:
                progress = self._run([t for t in self._heads() if t not in needed])
            former, completed = completed, sum(t.completed for t in self._heads())
            fruitless = 0 if progress or completed != former else fruitless + 1
            if fruitless > FRUITLESS_ROUNDS:
                spinning = "; ".join(t.describe() for t in self._heads())
                raise KernelFault("CUDA_ERROR_LAUNCH_TIMEOUT", f"deadlock: {spinning}")
        self._waited(task)

    def finish_queue(self, queue: Queue) -> None:
        """Run everything queued in one stream."""
        if queue.last is not None:
            self.finish(queue.last)

    def finish_all(self) -> None:
        """Run everything queued, the streams in random order."""
        for queue in self._rng.sample(self._queues, len(self._queues)):
            self.finish_queue(queue)
        self._forget_idle()

    def poll(self, task: Task | None) -> bool:
        """Whether ``task`` is done; if not, run something that it needs.

        So the first answer is as late as possible, and a loop of queries ends.
        """
        if task is None or task.done:
            self._waited(task)
            return True
        needed = list(self._needed(task, set()))
        if not self._run(needed[:1]):
            self._run([t for t in self._heads() if t is not needed[0]])
        return False

    def _waited(self, task: Task | None) -> None:
        """Record that the host knows a task is done."""
        if self._order is not None and task is not None and task.left is not None:
            self._order.waited(task.left)

    def _run(self, tasks: list[Task]) -> bool:
        """Advance each of some heads; True when one of them ended."""
        ended = False
        for task in tasks:
            queue = task.queue
            assert queue is not None
            if task.done:  # dropped: another task of its device has faulted
                continue
            assert queue.tasks[0] is task
            if self._advance(queue, task):
                task.done = True
                task.after = ()
                queue.tasks.popleft()
                ended = True
        return ended

    def _advance(self, queue: Queue, task: Task) -> bool:
        """Advance the head of a queue; see `Task.advance`."""
        owner = queue.scheduler
        try:
            owner._learn(task)
            self._begin_followers(queue)
            ended = task.advance()
        except KernelFault as fault:
            if owner is self:
                raise
            owner._poison(fault.code, fault.message)
        except MemoryRangeError as error:
            if owner is self:
                raise
            owner._poison(ILLEGAL_ADDRESS, str(error))
        else:
            if ended and owner._order is not None:
                task.left = owner._order.release(owner._device)
            return ended
        return False

    def _learn(self, task: Task) -> None:
        """Pass to a task's device the knowledge of what precedes the task."""
        if self._order is not None and task.known is not None:
            known = [task.known, *(t.left for t in task.after if t.left is not None)]
            self._order.acquire(self._device, np.maximum.reduce(known))

    @staticmethod
    def _begin_followers(queue: Queue) -> None:
        """Begin programmatic kernels that directly follow the head, as early as they may.

        The next one always: it sees none of the head's writes before its wait. Later ones if each
        kernel before them may trigger its dependents before its own wait.
        """
        head = queue.tasks[0]
        for task, follower in itertools.pairwise(queue.tasks):
            begun = task is head or task.triggers_dependents
            ready = follower.is_programmatic and all(t.done for t in follower.after)
            if not (task.is_kernel and begun and ready):
                return
            follower.begin_early()

    def _needed(self, task: Task, seen: set[int]) -> Iterator[Task]:
        """The runnable heads of queues that ``task`` waits for, its own included."""
        assert task.queue is not None
        head = task.queue.tasks[0]
        if id(head) in seen:
            return
        seen.add(id(head))
        pending = [t for t in head.after if not t.done]
        if not pending:
            yield head
        for earlier in pending:
            yield from self._needed(earlier, seen)

    def _heads(self) -> list[Task]:
        """All runnable heads of all devices, in random order."""
        queues = [q for scheduler in self._all_devices for q in scheduler._queues]
        heads = [q.tasks[0] for q in queues if q.tasks]
        runnable = [t for t in heads if all(a.done for a in t.after)]
        return self._rng.sample(runnable, len(runnable))

    def _forget_idle(self) -> None:
        self._queues = [q for q in self._queues if q.tasks or not q.is_closed]
