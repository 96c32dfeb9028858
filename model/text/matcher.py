"""Token masks of constrained answers, computed by llguidance (extra `serve`) in separate processes.

Untrusted constraints cost this process neither time nor memory (`constraint_worker`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import BusyError, ConstraintError, ModelError
from urdir.model.owner import Owner
from urdir.model.text.constraint_process import ConstraintProcess, Step
from urdir.model.text.constraint_starter import ConstraintStarter
from urdir.model.text.constraints import Constraint
from urdir.model.text.tags import cut
from urdir.model.text.tokenizer import Tokenizer

Mask = NDArray[np.uint32]

#: The version of llguidance that the extra `serve` requires. An older one refuses end tokens.
_OLDEST = (1, 9)
# In forced text a mask has every token that fits, not only the library's choice, which would need
# our tokeniser at every step.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_KEPT = 32  # compiled constraints without an answer
_MOST = 64  # constraints in use
_AT_ONCE = 2  # constraints being compiled
_QUEUE = 16  # constraints waiting to be compiled; seconds that they wait
_WAIT = 2.0


class Matcher:
    """Applies a constraint to one answer. Not thread-safe.

    Another process computes the mask, from the time a token is accepted until the mask is read.
    """

    def __init__(
        self, process: ConstraintProcess, n_tokens: int, failed: Callable[[], None]
    ) -> None:
        """``process`` holds a compiled constraint. ``failed`` is called when it fails, possibly by
        exceeding a limit.
        """
        self._process = process
        self._number = process.begin()
        finalize(self, process.forget, self._number)
        self._n_words = -(-n_tokens // 32)
        self._failed = failed
        self._step: Step | None = process.start  # None: being computed
        self._error: ConstraintError | None = None

    def mask(self, into: Mask) -> None:
        """Set bit i % 32 of word i // 32 of `into` if token i is allowed next, and clear the
        others.

        `into` has at least ceil(tokens / 32) words of u32; extra words are cleared. End ids are
        allowed if the answer may end. Raises ConstraintError if a limit was exceeded.
        """
        if into.dtype != np.uint32 or into.ndim != 1 or not into.flags.c_contiguous:
            raise ModelError("a token mask must be one contiguous row of u32")
        if len(into) < self._n_words:
            raise ModelError(f"a mask needs {self._n_words} words, not {len(into)}")
        into[: self._n_words] = np.frombuffer(self._known().mask, np.uint32)
        into[self._n_words :] = 0

    def accept(self, token_id: int) -> None:
        """Append a chosen token; ConstraintError if it is not allowed."""
        mask, _ = self._known()
        is_known = 0 <= token_id < 8 * len(mask)
        if not is_known or not mask[token_id // 8] >> token_id % 8 & 1:
            self._error = ConstraintError(f"token {token_id} is not allowed here")
            raise self._error
        self._step = None
        try:
            self._process.send(self._number, token_id)
        except ConstraintError as error:
            raise self._lost(error) from None

    def follow(self, proposed: Sequence[int], most: int, n_words: int) -> list[tuple[int, Mask]]:
        """Up to ``most`` drafts of the next tokens, each with the mask after it, (n_words,) u32 as
        in `mask`: those of ``proposed`` up to the first that is not allowed, then tokens of text
        that is forced. The answer stays as it is. Raises ConstraintError."""
        self._known()
        try:
            drafts = self._process.follow(self._number, most, proposed)
        except ConstraintError as error:
            raise self._lost(error) from None
        found = []
        for token, mask in drafts:
            words = np.zeros(n_words, np.uint32)
            words[: self._n_words] = np.frombuffer(mask, np.uint32)
            found.append((token, words))
        return found

    @property
    def is_done(self) -> bool:
        """Whether only an end id is allowed, or one was accepted."""
        return self._known().is_whole

    def _known(self) -> Step:
        """Wait for the allowed next tokens."""
        if self._error is not None:
            raise self._error
        if self._step is None:
            try:
                self._step = self._process.receive(self._number)
            except ConstraintError as error:
                raise self._lost(error) from None
        return self._step

    def _lost(self, error: ConstraintError) -> ConstraintError:
        self._error = error
        self._failed()
        return error


def _check_library() -> None:
    """Raise ModelError if llguidance is missing, or older than the extra requires."""
    wanted = "constrained output needs llguidance{}: pip install 'urdir[serve]'"
    if importlib.util.find_spec("llguidance") is None:
        raise ModelError(wanted.format(""))
    found = importlib.metadata.version("llguidance")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ModelError(wanted.format(f" {oldest} or newer, and {found} is installed"))


class ConstraintCompiler(Owner):
    """Compiles constraints for one tokeniser and caches recent ones. Thread-safe.

    Each constraint has a process with limits of time and memory (`constraint_process`), so others
    continue if one exceeds them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ModelError if llguidance is missing or the vocabulary has no end id."""
        _check_library()
        if not tokenizer.end_ids:
            raise ModelError(
                "constrained output needs an end-of-sequence token, which the vocabulary lacks"
            )
        self._tokenizer = tokenizer
        self._starter = ConstraintStarter(tokenizer)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, ConstraintProcess] = OrderedDict()
        # includes uncached processes that answers still use
        self._processes: WeakSet[ConstraintProcess] = WeakSet()
        self._turns = threading.Semaphore(_AT_ONCE)
        self._waiting = 0

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the start of an answer. The first call takes a second or two for 260,000
        tokens, one for a cached constraint microseconds.

        Raises ConstraintError: malformed, unsupported, too large, or no text matches. Raises
        BusyError if too many constraints are being compiled or in use.
        """
        process = self._kept(constraint) or self._compile(constraint)
        n_tokens = self._tokenizer.vocab_size
        return Matcher(process, n_tokens, lambda: self._drop(constraint, process))

    def close(self) -> None:
        """End the processes, including those of answers. Idempotent."""
        self._starter.close()
        with self._lock:
            processes = list(self._compiled.values())
            self._compiled.clear()
        for process in processes:
            process.close()

    def _kept(self, constraint: Constraint) -> ConstraintProcess | None:
        with self._lock:
            process = self._compiled.get(constraint)
            if process is None or process.is_gone:
                self._compiled.pop(constraint, None)
                return None
            self._compiled.move_to_end(constraint)
            return process

    def _drop(self, constraint: Constraint, process: ConstraintProcess) -> None:
        """Remove a constraint from the cache. Its matchers share the lexer's states, which grow
        with use: if one reaches a limit, all are near it."""
        with self._lock:
            if self._compiled.get(constraint) is process:
                del self._compiled[constraint]

    def _compile(self, constraint: Constraint) -> ConstraintProcess:
        grammar = self._grammar(constraint)
        self._starter.begin()
        with self._turn():
            if (kept := self._kept(constraint)) is not None:  # another thread compiled it meanwhile
                return kept
            self._make_room()
            process = self._starter.start()
            try:
                process.compile(grammar)
            except BaseException:
                process.close()
                raise
            with self._lock:
                self._processes.add(process)
                self._compiled[constraint] = process
        return process

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for a free compilation slot. Raises BusyError."""
        with self._lock:
            if self._waiting >= _QUEUE:
                raise _busy("too many constraints are being compiled")
            self._waiting += 1
        try:
            has_turn = self._turns.acquire(timeout=_WAIT)
        finally:
            with self._lock:
                self._waiting -= 1
        if not has_turn:
            raise _busy("too many constraints are being compiled")
        try:
            yield
        finally:
            self._turns.release()

    def _make_room(self) -> None:
        """Evict unused constraints, the oldest first. Raises BusyError."""
        with self._lock:
            unused = [key for key, process in self._compiled.items() if not process.is_used]
            too_many = max(len(unused) - _KEPT, len(self._processes) - _MOST) + 1
            for key in unused[: max(too_many, 0)]:
                del self._compiled[key]
            if len(self._processes) >= _MOST:
                raise _busy(f"answers in progress use {_MOST} different constraints")

    def _grammar(self, constraint: Constraint) -> str:
        """The text that llguidance compiles."""
        grammar = _OPTIONS + constraint.grammar
        markers = "".join(self._rules(i, marker) for i, marker in enumerate(constraint.markers))
        if not constraint.frame:
            return grammar + markers
        grammars = {"whole": _OPTIONS + constraint.frame + markers, "answer": grammar}
        if "marker_" in constraint.grammar:
            grammars["answer"] += markers
        return json.dumps(
            {"grammars": [{"name": n, "lark_grammar": g} for n, g in grammars.items()]}
        )

    def _rules(self, index: int, marker: str) -> str:
        """The rules marker_{index} and until_{index}."""
        controls = self._tokenizer.control_tokens()
        found = cut(marker, controls)
        pieces = [f"<[{controls[text]}]>" if known else json.dumps(text) for text, known in found]
        first = next((place for place, (_, known) in enumerate(found) if known), None)
        name = " ".join(pieces)
        if first is None:
            until = f"until_{index}[lazy]: /(?s:.*)/ {name}"
        else:  # text has no control token
            before = "" if not first else _escaped(found[0][0])
            until = f"until_{index}: /(?s:.*){before}/ {' '.join(pieces[first:])}"
        return f"\nmarker_{index}: {name}\n{until}"


def _escaped(text: str) -> str:
    """A text in a regular expression of a grammar."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _busy(what: str) -> BusyError:
    return BusyError(f"{what}: try again in 1 s", 1)
