"""A process that follows answers under a constraint, as its parent sees it."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from urdir.model.errors import ConstraintError
from urdir.model.foreign import one_line
from urdir.model.owner import Owner
from urdir.model.text.constraint_worker import (
    COMPILE,
    FAILED,
    FORGET,
    HEADER,
    IS_WHOLE,
    STEP,
)
from urdir.model.text.sandbox_limits import MEMORY_LIMIT

#: Seconds are a processor's: what else runs on the machine does not count. Fuel is 50 to 100 ns,
#: where the library counts it; a state of the lexer takes 1 to 2 kB.
LIMITS: dict[str, Any] = {
    "compile_seconds": 1.5,
    "mask_seconds": 0.25,  # for one token
    "step_seconds": 0.005,  # for each token, beside answer_seconds for all of an answer
    "answer_seconds": 1.0,
    "memory_bytes": MEMORY_LIMIT,  # of address space, the vocabulary's among them
    "kept_bytes": 64 << 20,  # of a compiled constraint, beside the vocabulary
    "llguidance": {
        "initial_lexer_fuel": 400_000,
        "max_lexer_states": 20_000,
        "max_grammar_size": 100_000,
        "verbose_errors": False,
    },
}
_PROCESS = 0  # the number of what concerns no answer
_AHEAD = 64  # masks not read yet: the tokens sent for them fit into a socket


class Step(NamedTuple):
    """What may come next: a bit for each token of the vocabulary, in words of u32. ``is_whole``
    where that is an end id alone.
    """

    mask: bytes
    is_whole: bool


class ProcessGoneError(ConstraintError):
    """The process has ended: the constraint took too much time or memory, or it was killed."""

    def __init__(self, limit: str = "mask_seconds", what: str = "for a token") -> None:
        super().__init__(
            f"the constraint takes longer than {LIMITS[limit]:g} s or more than "
            f"{LIMITS['memory_bytes'] >> 20} MB {what}: make it simpler"
        )


class Pipe(Protocol):
    """To a process and back: ``read`` and ``write`` raise ProcessGoneError where it has ended."""

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""

    def read(self, size: int) -> bytes:
        """So many bytes."""

    def write(self, data: bytes) -> None:
        """Send them all."""

    def close(self) -> None:
        """Closing twice does nothing."""


class ConstraintProcess(Owner):
    """A process that holds one constraint and follows the answers under it.

    Each answer has a number and is one thread's at a time; those of several threads may use the
    process together.
    """

    def __init__(self, pipe: Pipe) -> None:
        self.start = Step(b"", False)
        self._pipe = pipe
        self._numbers = itertools.count(1)
        self._used = {_PROCESS}
        self._unused: deque[int] = deque()  # finalisers add to it, who must not wait for a lock
        self._replies: dict[int, tuple[int, bytes]] = {}
        self._sent, self._read = 0, -1  # it says first that it is ready
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    def __del__(self) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Raises ProcessGoneError where it does not start, or has been killed since."""
        self.receive(_PROCESS)
        if self._pipe.is_gone:
            raise ProcessGoneError

    def compile(self, grammar: str) -> None:
        """Make it a process of this grammar, in llguidance's form; ``start`` is what may come
        first. Raises ConstraintError.
        """
        body = grammar.encode()
        try:
            self._send(COMPILE, _PROCESS, len(body), body)
            self.start = self.receive(_PROCESS)
        except ProcessGoneError:
            raise ProcessGoneError("compile_seconds", "to be compiled") from None

    @property
    def is_used(self) -> bool:
        """Whether an answer goes on."""
        return len(self._used) - 1 > len(self._unused)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, as far as is known without waiting."""
        return self._pipe.is_gone

    def begin(self) -> int:
        """The number of a new answer."""
        number = next(self._numbers)
        self._used.add(number)
        return number

    def send(self, number: int, token: int) -> None:
        """An answer goes on by a token: what may come then is computed from now on. Raises
        ProcessGoneError.
        """
        with self._reading:  # else both sides could wait until the other one reads
            while self._sent - self._read >= _AHEAD:
                self._read_reply()
        self._send(STEP, number, token)

    def receive(self, number: int) -> Step:
        """What may come after the token that was sent. Raises ConstraintError."""
        with self._reading:
            while number not in self._replies:
                self._read_reply()
            result, body = self._replies.pop(number)
        if result == FAILED:
            reason = one_line(body.decode(errors="replace"))
            raise ConstraintError(f"the constraint cannot be used: {reason}")
        return Step(body, result == IS_WHOLE)

    def forget(self, number: int) -> None:
        """An answer is over."""
        self._unused.append(number)

    def close(self) -> None:
        """End the process, at once or when its time is over; closing twice does nothing."""
        self._pipe.close()

    def _read_reply(self) -> None:
        with self._whole():
            result, number, size = HEADER.unpack(self._pipe.read(HEADER.size))
            body = self._pipe.read(size)
        self._read += 1
        if number in self._used:  # others are over
            self._replies[number] = result, body

    def _send(self, operation: int, number: int, value: int, body: bytes = b"") -> None:
        with self._writing:
            data = HEADER.pack(operation, number, value) + body
            while self._unused:
                over = self._unused.popleft()
                self._used.discard(over)
                self._replies.pop(over, None)
                data += HEADER.pack(FORGET, over, 0)
            with self._whole():
                self._pipe.write(data)
            self._sent += 1

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """End the process where Ctrl-C leaves half a message: what follows would mean nothing."""
        try:
            yield
        except BaseException:
            self.close()
            raise
