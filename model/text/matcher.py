"""Which token may come next under a constraint, by llguidance (extra `serve`) in processes of their
own (`constraint_worker`): what strangers send costs this process neither time nor memory.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import BusyError, ConstraintError, ModelError
from urdir.model.owner import Owner
from urdir.model.text.constraint_process import ConstraintProcess, Step
from urdir.model.text.constraint_starter import ConstraintStarter
from urdir.model.text.constraints import Constraint
from urdir.model.text.tokenizer import Tokenizer

Mask = NDArray[np.uint32]

# Where text is forced a mask has every token that fits, not only the library's choice of one: it
# would ask our tokeniser for that at every step.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_KEPT = 32  # compiled constraints that no answer uses
_MOST = 64  # constraints of all answers
_AT_ONCE = 2  # constraints that are compiled
_QUEUE = 16  # those that wait for that, and for how many seconds
_WAIT = 2.0


class Matcher:
    """Follows one answer under a constraint; not for use by two threads at once.

    What may come is computed by another process, from when a token is accepted until a mask is
    wanted.
    """

    def __init__(
        self, process: ConstraintProcess, n_tokens: int, failed: Callable[[], None]
    ) -> None:
        """``process`` holds a compiled constraint. ``failed`` is called where it fails, which may
        be for a limit.
        """
        self._process = process
        self._number = process.begin()
        finalize(self, process.forget, self._number)
        self._n_words = -(-n_tokens // 32)
        self._failed = failed
        self._step: Step | None = process.start  # None: it is being computed
        self._error: ConstraintError | None = None

    def mask(self, into: Mask) -> None:
        """Set bit i % 32 of word i // 32 of `into` where token i may come, and clear the others.

        `into` has ceil(tokens / 32) words of u32, or more, which are cleared. End ids are allowed
        where the answer may end. Raises ConstraintError where a limit is exceeded on the way.
        """
        if into.dtype != np.uint32 or into.ndim != 1 or not into.flags.c_contiguous:
            raise ModelError("a mask of tokens is one row of u32, without gaps")
        if len(into) < self._n_words:
            raise ModelError(f"a mask needs {self._n_words} words, not {len(into)}")
        into[: self._n_words] = np.frombuffer(self._known().mask, np.uint32)
        into[self._n_words :] = 0

    def accept(self, token_id: int) -> None:
        """Go on with a token that was chosen; ConstraintError for one that is not allowed."""
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

    @property
    def is_done(self) -> bool:
        """True where nothing but an end id may come, or one has."""
        return self._known().is_whole

    def _known(self) -> Step:
        """What may come, once it is computed."""
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


class ConstraintCompiler(Owner):
    """Compiles constraints for one tokeniser, and keeps those used last; for all threads.

    Each has a process, with limits of time and memory (`constraint_process`); so others go on
    where one takes too much.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ModelError where llguidance is missing or the vocabulary has no end id."""
        if importlib.util.find_spec("llguidance") is None:
            raise ModelError("constrained output needs llguidance: pip install 'urdir[serve]'")
        if not tokenizer.end_ids:
            raise ModelError("constrained output needs an end-of-sequence token; there is none")
        self._tokenizer = tokenizer
        self._starter = ConstraintStarter(tokenizer)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, ConstraintProcess] = OrderedDict()
        self._processes: WeakSet[ConstraintProcess] = WeakSet()  # also of answers alone
        self._turns = threading.Semaphore(_AT_ONCE)
        self._waiting = 0

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the start of an answer. The first takes a second or two for 260,000 tokens,
        and one of a constraint that is compiled microseconds.

        Raises ConstraintError: malformed, not supported, too large, or no text matches. Raises
        BusyError where too many are compiled or in use.
        """
        process = self._kept(constraint) or self._compile(constraint)
        n_tokens = self._tokenizer.vocab_size
        return Matcher(process, n_tokens, lambda: self._drop(constraint, process))

    def close(self) -> None:
        """End the processes, also those of answers; closing twice does nothing."""
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
        """Answers from now on begin anew: a lexer's states are shared by its matchers and grow with
        them, so that all of them are near a limit that one has reached."""
        with self._lock:
            if self._compiled.get(constraint) is process:
                del self._compiled[constraint]

    def _compile(self, constraint: Constraint) -> ConstraintProcess:
        grammar = self._grammar(constraint)
        self._starter.begin()
        with self._turn():
            if (kept := self._kept(constraint)) is not None:  # others waited for it, too
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
        """Wait for others that are compiled. Raises BusyError."""
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
        """Drop constraints that no answer uses, the oldest first, for another. Raises BusyError."""
        with self._lock:
            unused = [key for key, process in self._compiled.items() if not process.is_used]
            too_many = max(len(unused) - _KEPT, len(self._processes) - _MOST) + 1
            for key in unused[: max(too_many, 0)]:
                del self._compiled[key]
            if len(self._processes) >= _MOST:
                raise _busy(f"the answers under way have {_MOST} different constraints")

    def _grammar(self, constraint: Constraint) -> str:
        """What llguidance compiles."""
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
        token_id = self._tokenizer.control_id(marker)
        if token_id is not None:
            name, lazy = f"<[{token_id}]>", ""
        else:
            name, lazy = json.dumps(marker), "[lazy]"
        return f"\nmarker_{index}: {name}\nuntil_{index}{lazy}: /(?s:.*)/ {name}"


def _busy(what: str) -> BusyError:
    return BusyError(f"{what}: try again in 1 s", 1)
