"""A server with front ends apart from an engine that steps at a set pace, as a program.

    python tests/model/serve/apart_server.py --workers 2 --step 0.008 --sequences 256

Tokens follow from seeds; a request of the seed 666 kills the engine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Finish, Item, Piece, Request, TokenChoice
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.engine.texts import open_texts
from urdir.model.errors import BusyError, ConstraintError, ContextFullError, PrefixFileError
from urdir.model.serve.access import Access
from urdir.model.serve.apart.settings import Front, Settings
from urdir.model.serve.apart.supervisor import serve_apart
from urdir.model.serve.interface import Defaults
from urdir.model.serve.limits import Limits
from urdir.model.serve.listening import listen

CONTEXT = 4096
DEADLY = 666


@dataclass(eq=False)
class _Task:
    answer: Answer
    tokens: list[int] = field(default_factory=list)


class PacedService:
    """As much of a `Service` as front ends need: ``sequences`` answers have a token a step.

    Drawn tokens are those of the request's seed. A prompt takes ``prompt`` seconds.
    """

    lost = None

    def __init__(self, post: Callable[[Callable[[], None]], None], args: argparse.Namespace):
        self._post = post
        self._args = args
        self._waiting: deque[_Task] = deque()
        self._running: list[_Task] = []
        self._wake = threading.Condition()
        self._extra: list[tuple[Answer, Item]] = []
        self._steps = self._generated = 0
        self._ends, self._scale = False, 0.0
        self.compiler = SimpleNamespace(matcher=self._compile)
        self._thread = threading.Thread(target=self._run, name="service")
        self._thread.start()

    def _compile(self, constraint: Any) -> None:
        if "refused" in constraint.grammar:
            raise ConstraintError("no such rule")

    def answer_to(self, request: Request, deliver: Callable[[Item], None]) -> Answer:
        if request.settings.seed == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(request.prompt) >= CONTEXT:
            raise ContextFullError("the prompt is too long")
        return Answer(request, (), None, deliver)

    def expect(self, look: Callable[[], bool]) -> bool:
        return False

    def add(self, answer: Answer) -> None:
        with self._wake:
            if len(self._waiting) >= self._args.queue:
                self._extra.append((answer, BusyError("the queue is full", 3.0)))
            else:
                self._waiting.append(_Task(answer))
            self._wake.notify()

    def cancel(self, answer: Answer) -> None:
        with self._wake:
            self._running = [task for task in self._running if task.answer is not answer]
            self._waiting = deque(task for task in self._waiting if task.answer is not answer)

    def stop(self, answer: Answer) -> None:
        with self._wake:
            tasks = [task for task in self._running if task.answer is answer]
            self._extra += [(answer, _ending(task, Finish.STOP)) for task in tasks]
            self._running = [task for task in self._running if task.answer is not answer]
            self._wake.notify()

    def act_on_slot(self, action: SlotAction) -> SlotDone:
        if action.slot > 3:
            raise PrefixFileError(f"slot {action.slot}: there are 4")
        return SlotDone(7, 0, 0.0)

    def adapters(self, scales: Mapping[int, float] | None) -> tuple[AdapterScale, ...]:
        if scales is not None:
            self._scale = scales.get(0, 0.0)
        return (AdapterScale("poet", "/a/poet.gguf", self._scale),)

    def metrics(self) -> Metrics:
        return Metrics(
            queued=len(self._waiting),
            running=len(self._running),
            steps=self._steps,
            generated_tokens=self._generated,
        )

    def close(self) -> None:
        with self._wake:
            self._ends = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._ends or self._running or self._waiting or self._extra
                )
                before = len(self._running)
                while self._waiting and len(self._running) < self._args.sequences:
                    self._running.append(self._waiting.popleft())
                tasks = list(self._running)
            if tasks:
                time.sleep(self._args.prompt if len(tasks) > before else self._args.step)
            told = [(task.answer, item) for task in tasks for item in self._step(task)]
            with self._wake:
                ended = {answer for answer, item in told if isinstance(item, Ending)}
                self._running = [task for task in self._running if task.answer not in ended]
                told += self._extra
                self._extra = []
                self._steps += bool(tasks)
                self._generated += len(tasks)
            self._post(partial(_deliver, told))

    def _step(self, task: _Task) -> list[Item]:
        request, count = task.answer.request, len(task.tokens)
        seed = request.settings.seed if request.settings.temperature else 0
        token = 300 + hash((seed, request.settings.nonce, count)) % 700
        task.tokens.append(token)
        likely = request.settings.logprobs
        choice = TokenChoice(token)
        if likely is not None:
            choice = TokenChoice(token, -0.5, tuple((token + i, -0.5 - i) for i in range(likely)))
        items: list[Item] = [Piece("", (choice,))]
        if len(task.tokens) == (request.limit or CONTEXT):
            items.append(_ending(task, Finish.LENGTH))
        return items


def _ending(task: _Task, finish: Finish) -> Ending:
    return Ending(finish, len(task.answer.request.prompt), 0, len(task.tokens))


def _deliver(told: list[tuple[Answer, Item]]) -> None:
    for answer, item in told:
        answer.deliver(item)


def open_paced(args: argparse.Namespace, post: Any) -> tuple[Any, Any]:
    """In place of an engine, which takes a while to open."""
    time.sleep(args.load)
    engine = SimpleNamespace(
        name="paced", session=SimpleNamespace(context=CONTEXT), close=lambda: None
    )
    return engine, PacedService(post, args)


def names(name: str) -> list[str]:
    return ["paced"]


def greet(port: int, name: str, context: int) -> None:
    print(f"http://127.0.0.1:{port}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="whose texts front ends have (default: the demo model)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step", type=float, default=0.002)
    parser.add_argument("--prompt", type=float, default=0.002)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--queue", type=int, default=1024)
    parser.add_argument("--open", type=int, default=Limits().open_requests)
    parser.add_argument("--load", type=float, default=0.0, help="seconds; greets before, too")
    return parser.parse_args()


def defaults(metadata: object) -> Defaults:
    return Defaults()


def main() -> int:
    args = parse()
    limits = replace(Limits(), open_requests=args.open)
    front = Front(
        partial(open_texts, args.model), names, defaults, Access(), limits, (("poet", 1.0),)
    )
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        if args.load:
            greet(port, "", 0)
        settings = Settings(partial(open_paced, args), front, args.workers, partial(greet, port))
        try:
            serve_apart(settings, listener)
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
