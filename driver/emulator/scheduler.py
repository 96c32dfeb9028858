"""Streams as queues of tasks that run only when something waits for them.

As late as CUDA permits: waiting for a task runs the tasks before it in its queue and what those
wait for, nothing else. Work of other streams runs only when what is needed spins on it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from urdir.driver.emulator.machine.faults import KernelFault

#: Rounds over everything runnable in which no task ends, after which it is a deadlock. (Kernels
#: of two streams may well pass a flag back and forth a few times.)
FRUITLESS_ROUNDS = 1000


class Task:
    """A piece of queued work. ``after``: unfinished tasks of other queues that come before it."""

    #: May begin before the task in front of it in its queue is complete (programmatic launch).
    is_programmatic = False
    is_kernel = False
    #: A kernel that triggers its dependents itself, perhaps at its very start.
    triggers_dependents = False

    def __init__(self) -> None:
        self.done = False
        self.after: tuple[Task, ...] = ()
        self.queue: Queue | None = None

    def advance(self) -> bool:
        """Run; False when it spins on something that another task must provide."""
        raise NotImplementedError

    def begin_early(self) -> None:
        """Run up to the point that needs the tasks in front of it (programmatic tasks only)."""

    def describe(self) -> str:
        """What it is and what it waits for, for a deadlock's message."""
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

    ``is_blocking``: ordered with the legacy default stream; ``is_closed``: destroyed, what is
    still in it runs all the same.
    """

    def __init__(self, is_blocking: bool = True, flags: int = 0, priority: int = 0) -> None:
        self.tasks: deque[Task] = deque()
        self.is_blocking = is_blocking
        self.is_closed = False
        self.flags = flags
        self.priority = priority
        self.last: Task | None = None


class Scheduler:
    """The queues of one context and the rules between them; queue ``legacy`` is stream 0."""

    def __init__(self, rng: random.Random) -> None:
        self.legacy = Queue()
        self._queues = [self.legacy]
        self._rng = rng

    def add_queue(self, queue: Queue) -> Queue:
        """Take a new stream in."""
        self._queues.append(queue)
        return queue

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
        queue.tasks.append(task)
        queue.last = task
        return task

    def finish(self, task: Task) -> None:
        """Run until ``task`` is done. Raises KernelFault: a kernel's own, or LAUNCH_TIMEOUT when
        nothing runnable makes progress any more.
        """
        fruitless = 0
        while not task.done:
            needed = list(self._needed(task, set()))
            progress = self._run(needed)
            if not progress:
                progress = self._run([t for t in self._heads() if t not in needed])
            fruitless = 0 if progress else fruitless + 1
            if fruitless > FRUITLESS_ROUNDS:
                spinning = "; ".join(t.describe() for t in self._heads())
                raise KernelFault("CUDA_ERROR_LAUNCH_TIMEOUT", f"deadlock: {spinning}")

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
        """Whether ``task`` is done; if not, something it needs has run afterwards.

        So the first answer is as late as can be, and a loop of queries ends.
        """
        if task is None or task.done:
            return True
        needed = list(self._needed(task, set()))
        if not self._run(needed[:1]):
            self._run([t for t in self._heads() if t is not needed[0]])
        return False

    def _run(self, tasks: list[Task]) -> bool:
        """Advance each of some heads; True when one of them ended."""
        ended = False
        for task in tasks:
            queue = task.queue
            assert queue is not None
            assert queue.tasks[0] is task
            self._begin_followers(queue)
            if task.advance():
                task.done = True
                task.after = ()
                queue.tasks.popleft()
                ended = True
        return ended

    @staticmethod
    def _begin_followers(queue: Queue) -> None:
        """Begin programmatic kernels that directly follow the head, as early as they may.

        The next one always: nothing that the head writes is visible to it before its wait. Later
        ones as long as each kernel before them may trigger its dependents before its own wait.
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
        """All runnable heads, in random order."""
        heads = [q.tasks[0] for q in self._queues if q.tasks]
        runnable = [t for t in heads if all(a.done for a in t.after)]
        return self._rng.sample(runnable, len(runnable))

    def _forget_idle(self) -> None:
        self._queues = [q for q in self._queues if q.tasks or not q.is_closed]
