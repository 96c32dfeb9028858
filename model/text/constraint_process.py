"""Parent side of a process that applies one constraint to answers."""

from __future__ import annotations

import itertools
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from urdir.model.errors import ConstraintError
from urdir.model.foreign import one_line
from urdir.model.owner import Owner
from urdir.model.text.constraint_worker import (
    COMPILE,
    DRAFT,
    FAILED,
    FOLLOW,
    FORGET,
    HEADER,
    IS_WHOLE,
    STEP,
)
from urdir.model.text.sandbox_limits import MEMORY_LIMIT

#: Seconds are CPU time: other load on the machine does not count. Fuel is llguidance's measure, 50
#: to 100 ns each; a lexer state takes 1 to 2 kB.
LIMITS: dict[str, Any] = {
    "compile_seconds": 1.5,
    "mask_seconds": 0.25,  # per token
    "step_seconds": 0.005,  # per token; the excess counts against answer_seconds
    "answer_seconds": 1.0,
    "memory_bytes": MEMORY_LIMIT,  # address space, vocabulary included
    "kept_bytes": 64 << 20,  # memory of a compiled constraint, without the vocabulary
    "llguidance": {
        "initial_lexer_fuel": 400_000,
        "max_lexer_states": 20_000,
        "max_grammar_size": 100_000,
        "verbose_errors": False,
    },
}
_PROCESS = 0  # the number of messages that belong to no answer
_AHEAD = 64  # unread masks: their requests fit into a socket's buffer


class Step(NamedTuple):
    """The allowed next tokens: one bit per token of the vocabulary, in u32 words. ``is_whole`` if
    only an end id is allowed.
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
    """A connection to a process: ``read`` and ``write`` raise ProcessGoneError once it has
    ended."""

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""

    def read(self, size: int) -> bytes:
        """Read exactly ``size`` bytes."""

    def write(self, data: bytes) -> None:
        """Write all bytes."""

    def close(self) -> None:
        """Close the connection. Idempotent."""


class ConstraintProcess(Owner):
    """A process that holds one constraint and tracks the answers under it.

    Each answer has a number and is used by one thread at a time; answers of several threads may
    share the process.
    """

    def __init__(self, pipe: Pipe) -> None:
        self.start = Step(b"", False)
        self._pipe = pipe
        self._numbers = itertools.count(1)
        #: Answers in progress, and whether the process knows of them.
        self._used = {_PROCESS: True}
        self._unused: deque[int] = deque()  # finalisers append to it, and must not wait for a lock
        self._replies: dict[int, tuple[int, bytes]] = {}
        self._sent, self._read = 0, -1  # the first reply reports that the process is ready
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    def __del__(self) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Raises ProcessGoneError if the process does not start, or was killed since."""
        self.receive(_PROCESS)
        if self._pipe.is_gone:
            raise ProcessGoneError

    def compile(self, grammar: str) -> None:
        """Compile a grammar in llguidance's form; ``start`` becomes the first mask. Raises
        ConstraintError.
        """
        body = grammar.encode()
        try:
            self._send(COMPILE, _PROCESS, len(body), body)
            self.start = self.receive(_PROCESS)
        except ProcessGoneError:
            raise ProcessGoneError("compile_seconds", "to be compiled") from None

    @property
    def is_used(self) -> bool:
        """Whether an answer is in progress."""
        return len(self._used) - 1 > len(self._unused)

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended; does not wait."""
        return self._pipe.is_gone

    def begin(self) -> int:
        """The number of a new answer."""
        number = next(self._numbers)
        self._used[number] = False
        return number

    def send(self, number: int, token: int) -> None:
        """Send the next token of an answer; the process starts computing the mask after it. Raises
        ProcessGoneError.
        """
        with self._reading:  # otherwise both sides could block, each waiting for the other to read
            while self._sent - self._read >= _AHEAD:
                self._read_reply()
        self._send(STEP, number, token)

    def receive(self, number: int) -> Step:
        """The mask after the last token sent. Raises ConstraintError."""
        with self._reading:
            while number not in self._replies:
                self._read_reply()
            result, body = self._replies.pop(number)
        if result == FAILED:
            reason = _reason(body.decode(errors="replace"))
            raise ConstraintError(f"the constraint cannot be used: {reason}")
        return Step(body, result == IS_WHOLE)

    def follow(self, number: int, most: int, proposed: Sequence[int]) -> list[tuple[int, bytes]]:
        """Up to ``most`` drafts of an answer's next tokens, with the mask after each; see
        `Matcher.follow`. Nothing of the answer may be unread. Raises ConstraintError."""
        words = (most, *proposed[:most])
        body = b"".join(map(DRAFT.pack, words))
        self._send(FOLLOW, number, len(body), body)
        data, found = memoryview(self.receive(number).mask), []
        while data:
            (token,) = DRAFT.unpack(data[: DRAFT.size])
            end = DRAFT.size + len(self.start.mask)
            found.append((token, bytes(data[DRAFT.size : end])))
            data = data[end:]
        return found

    def forget(self, number: int) -> None:
        """Release a finished answer. One without a token is unknown to the process, and may be
        followed by others that send nothing."""
        if self._used[number]:
            self._unused.append(number)
        else:
            del self._used[number]

    def close(self) -> None:
        """End the process, at once or when its time is over. Idempotent."""
        self._pipe.close()

    def _read_reply(self) -> None:
        with self._whole():
            result, number, size = HEADER.unpack(self._pipe.read(HEADER.size))
            body = self._pipe.read(size)
        self._read += 1
        if number in self._used:  # others have finished
            self._replies[number] = result, body

    def _send(self, operation: int, number: int, value: int, body: bytes = b"") -> None:
        with self._writing:
            self._used[number] = True
            data = HEADER.pack(operation, number, value) + body
            while self._unused:
                over = self._unused.popleft()
                self._used.pop(over, None)
                self._replies.pop(over, None)
                data += HEADER.pack(FORGET, over, 0)
            with self._whole():
                self._pipe.write(data)
            self._sent += 1

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """End the process if Ctrl-C leaves a partial message: later ones would be misread."""
        try:
            yield
        except BaseException:
            self.close()
            raise


#: Around what is wrong llguidance writes its place, and the lines there: of the grammar as it is
#: compiled, not of the user's text.
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): |\n *\d+ \| .*", re.DOTALL)


def _reason(message: str) -> str:
    """What is wrong with a constraint, in one line."""
    return one_line(_PLACE.sub("", message))
