"""Worker process that applies untrusted constraints (parent side: `constraint_process`).

llguidance bounds its computation by fuel, but not everywhere: one token under twenty patterns
joined by "and" can take minutes and gigabytes. So each constraint has its own process, which the
system ends when it has computed for too long or takes too much memory.

`sandbox_main` starts one process, which builds the vocabulary data shared by all constraints. On
systems with fork, each socket received over the socket `control` becomes a new process; elsewhere
the first process serves one constraint itself.

Such a process reports that it is ready, and then takes requests:
    request: HEADER of operation, number of an answer, value
    reply:   HEADER of result, number of an answer, size; then that many bytes: a mask or an error

`COMPILE` (value: size of the grammar, which follows), `STEP` (value: a token; the first begins the
answer) and `FOLLOW` (value: size of what follows: how many drafts at most, and proposed ones, DRAFT
each) have a reply, `FORGET` has none. That of `FOLLOW` is drafts, each with the mask after it.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urdir.model.text.sandbox_main import Messages

HEADER = struct.Struct("<BIi")
DRAFT = struct.Struct("<I")
#: Operations: compile a grammar; append a token to an answer; release an answer; draft its tokens.
COMPILE, STEP, FORGET, FOLLOW = range(4)
#: Results: a mask; a mask of end ids only; an error.
GOES_ON, IS_WHOLE, FAILED = range(3)


class _Tokens:
    """The vocabulary in the form of llguidance.TokenizerWrapper."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.special_token_ids = settings["special"]
        self.eos_token_id = settings["ends"][0]
        self.bos_token_id = settings["bos"]
        self.tokens = list(self._cut(base64.b64decode(settings["bytes"]), settings["lengths"]))

    def _cut(self, joined: bytes, lengths: list[int]) -> Iterator[bytes]:
        start = 0
        for length in lengths:
            yield joined[start : start + length]
            start += length

    def __call__(self, text: bytes) -> list[int]:
        """Tokenise forced text; grammars only need this rarely."""
        return []


class _Memory:
    """Memory of this process above its start; 0 if the system does not report it."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            self._file = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115
        self._start = 0
        self._start = self.taken()

    def taken(self) -> int:
        """Bytes in use above the start."""
        if self._file is None:
            return 0
        self._file.seek(0)
        return int(self._file.read(256).split()[1]) * mmap.PAGESIZE - self._start


@dataclass(slots=True)
class _Answer:
    """An answer so far, with the seconds left beyond the budget of each token."""

    matcher: Any
    seconds: float


class _ConstraintError(Exception):
    """llguidance reported an error."""


class _Follower:
    """Tracks the answers under one constraint. ``new_matcher`` makes the matcher of a grammar.
    ``by_bytes`` are the tokens of texts."""

    def __init__(
        self,
        new_matcher: Callable[[str], Any],
        settings: Mapping[str, Any],
        by_bytes: Mapping[bytes, int],
    ) -> None:
        self._new_matcher = new_matcher
        self._by_bytes = by_bytes
        self._longest = max(map(len, by_bytes), default=0)
        self._ends = frozenset(settings["ends"])
        self._limits = settings["limits"]
        self._mask_bytes = 4 * -(-len(settings["lengths"]) // 32)
        self._memory = _Memory()
        self._start: Any = None
        self._answers: dict[int, _Answer] = {}

    def run(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        """Answer requests until the parent closes the pipe."""
        _reply(writer, GOES_ON, 0, b"")  # ready
        while len(header := reader.read(HEADER.size)) == HEADER.size:
            operation, number, value = HEADER.unpack(header)
            if operation == FORGET:
                self._answers.pop(number, None)
                continue
            try:
                if operation == COMPILE:
                    result, body = self._compile(reader.read(value).decode())
                elif operation == FOLLOW:
                    result, body = self._follow(number, reader.read(value))
                else:
                    result, body = self._step(number, value)
            except BaseException as error:  # a panic in the library is not an Exception
                result, body = FAILED, str(error).encode(errors="replace")
            _limit_time(0)
            _reply(writer, result, number, body)

    def _compile(self, grammar: str) -> tuple[int, bytes]:
        _limit_time(self._limits["compile_seconds"])
        self._start = self._new_matcher(grammar)
        return self._mask(self._start)

    def _step(self, number: int, token: int) -> tuple[int, bytes]:
        """The mask after a token. Time above ``step_seconds`` counts against ``answer_seconds``."""
        start = time.thread_time()  # exact even with a timer; process time is not
        _limit_time(self._limits["mask_seconds"])
        if (answer := self._answers.get(number)) is None:
            answer = _Answer(self._start.deep_copy(), self._limits["answer_seconds"])
            self._answers[number] = answer
        answer.matcher.consume_token(token)
        reply = self._mask(answer.matcher)
        answer.seconds -= max(0.0, time.thread_time() - start - self._limits["step_seconds"])
        if answer.seconds < 0:
            raise _ConstraintError("computing its tokens takes too long: make it simpler")
        return reply

    def _follow(self, number: int, body: bytes) -> tuple[int, bytes]:
        """Drafts with the mask after each, by a copy of the answer's matcher."""
        start = time.thread_time()
        most, *left = (word for (word,) in DRAFT.iter_unpack(body))
        _limit_time(self._limits["mask_seconds"])
        answer = self._answers.get(number)
        matcher = (self._start if answer is None else answer.matcher).deep_copy()
        found = list[bytes]()
        while len(found) < most and (draft := self._next(matcher, left)) is not None:
            matcher.consume_token(draft)
            _, mask = self._mask(matcher)
            found.append(DRAFT.pack(draft) + mask)
        if answer is not None:
            allowed = self._limits["step_seconds"] * (1 + len(found))
            answer.seconds -= max(0.0, time.thread_time() - start - allowed)
        return GOES_ON, b"".join(found)

    def _next(self, matcher: Any, proposed: list[int]) -> int | None:
        """The next draft: the first of ``proposed`` if it is allowed, otherwise the longest token
        of forced text, after which no others are proposed. None without either, and at an end."""
        if proposed:
            first = proposed.pop(0)
            if first not in self._ends and matcher.validate_tokens([first]) == 1:
                return first
            proposed.clear()
        forced = matcher.compute_ff_bytes()
        for end in range(min(len(forced), self._longest), 0, -1):
            token = self._by_bytes.get(forced[:end])
            if token is not None and matcher.validate_tokens([token]) == 1:
                return token
        return None

    def _mask(self, matcher: Any) -> tuple[int, bytes]:
        if matcher.is_error():
            raise _ConstraintError(matcher.get_error())
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise _ConstraintError(matcher.get_error())
        if self._memory.taken() > (most := self._limits["kept_bytes"]):
            raise _ConstraintError(f"it takes more than {most >> 20} MB: make it smaller")
        return (IS_WHOLE if matcher.is_stopped() else GOES_ON), mask[: self._mask_bytes]


def _reply(writer: IO[bytes], result: int, number: int, body: bytes) -> None:
    writer.write(HEADER.pack(result, number, len(body)) + body)
    writer.flush()


def _limit_time(seconds: float) -> None:
    """Have the system end this process after ``seconds`` of CPU time; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def serve(settings: Mapping[str, Any], messages: Messages, limits: ModuleType) -> None:
    """Apply constraints, or start processes that do, until the parent closes the pipe."""
    try:
        new_matcher, by_bytes = _matchers(settings)
    except BaseException as error:  # a panic in the library is not an Exception
        messages.write({"error": str(error)})
        return
    gc.collect()
    gc.freeze()  # forked processes keep sharing these pages
    messages.write({})

    def follow(reader: IO[bytes], writer: IO[bytes]) -> None:
        follower = _Follower(new_matcher, settings, by_bytes)
        limits.confine(settings["limits"]["memory_bytes"])
        follower.run(reader, writer)

    if settings["control"] is None:
        follow(messages.reader, messages.writer)
    else:
        _fork_for_each(socket.socket(fileno=settings["control"]), follow)


def _matchers(settings: Mapping[str, Any]) -> tuple[Callable[[str], Any], Mapping[bytes, int]]:
    """What makes matchers, and the tokens of texts."""
    import llguidance

    vocabulary = _Tokens(settings)
    tokens = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary), eos_token=settings["ends"]
    )
    limits = llguidance.LLParserLimits(**settings["limits"]["llguidance"])
    special = frozenset(settings["special"])
    texts = enumerate(vocabulary.tokens)
    by_bytes = {text: token for token, text in texts if text and token not in special}

    def new_matcher(grammar: str) -> Any:
        return llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)

    return new_matcher, by_bytes


def _fork_for_each(control: socket.socket, follow: Callable[[IO[bytes], IO[bytes]], None]) -> None:
    """Fork a process for each socket received."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps ended children
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in descriptors:
            # with too many processes the parent sees the socket closed
            with contextlib.suppress(OSError):
                if os.fork() == 0:
                    control.close()
                    try:
                        with open(descriptor, "rb") as reader, open(descriptor, "wb") as writer:
                            follow(reader, writer)
                    finally:
                        os._exit(0)
            os.close(descriptor)
