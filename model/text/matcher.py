"""Which token may come next under a constraint, by llguidance (extra `serve`).

The library is entered here alone, and every failure of it leaves as a ConstraintError: its panics
are no exceptions in Python's sense, and most of its errors are states of its objects.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConstraintError, ModelError
from urdir.model.text.constraints import Constraint
from urdir.model.text.tokenizer import Tokenizer

Mask = NDArray[np.uint32]

# Where text is forced a mask has every token that fits, not only the library's choice of one: it
# would ask our tokeniser for that at every step.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_KEPT = 32  # compiled constraints
# A step: about 15 ms at most. A lexer's state takes 1 to 2 kB.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 400_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_TIME_LIMIT = 1.5  # seconds for compiling, which the library's own limits bound not always
_AT_ONCE = 2  # constraints that are compiled, those given up among them
_MESSAGE_LIMIT = 300  # characters of the library's own message


class Matcher:
    """Follows one answer under a constraint; not for use by two threads at once.

    `mask` runs without the interpreter's lock, so that another thread can drive a GPU meanwhile.
    """

    def __init__(self, matcher: Any, n_tokens: int, failed: Callable[[], None]) -> None:
        """`matcher` is an llguidance.LLMatcher at the start of an answer (ConstraintCompiler).
        `failed` is called where a step fails, which may be for a limit.
        """
        self._matcher = matcher
        self._n_words = -(-n_tokens // 32)
        self._failed = failed

    def mask(self, into: Mask) -> None:
        """Set bit i % 32 of word i // 32 of `into` where token i may come, and clear the others.

        `into` has ceil(tokens / 32) words of u32, or more, which are cleared. End ids are allowed
        where the answer may end. Raises ConstraintError where a limit is exceeded on the way.
        """
        if into.dtype != np.uint32 or into.ndim != 1 or not into.flags.c_contiguous:
            raise ModelError("a mask of tokens is one row of u32, without gaps")
        if len(into) < self._n_words:
            raise ModelError(f"a mask needs {self._n_words} words, not {len(into)}")
        words = into[: self._n_words]
        with _translated():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._failed()
        _check(self._matcher)
        into[self._n_words :] = 0

    def accept(self, token_id: int) -> None:
        """Go on with a token that was chosen; ConstraintError for one that is not allowed."""
        with _translated():
            is_allowed = self._matcher.consume_token(token_id)
        if not is_allowed:
            self._failed()
            reason = _one_line(self._matcher.get_error())
            raise ConstraintError(f"token {token_id} is not allowed here: {reason}")

    @property
    def is_done(self) -> bool:
        """True where nothing but an end id may come, or one has."""
        with _translated():
            return bool(self._matcher.is_stopped())


class ConstraintCompiler:
    """Compiles constraints for one tokeniser, and keeps those used last; for all threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes a second or two for 260,000 tokens.

        Raises ModelError where llguidance is missing or the vocabulary has no end id.
        """
        try:
            import llguidance
        except ImportError:
            raise ModelError(
                "constrained output needs llguidance: pip install 'urdir[serve]'"
            ) from None
        if not tokenizer.end_ids:
            raise ModelError("constrained output needs an end-of-sequence token; there is none")
        self._tokenizer = tokenizer
        self._new_matcher: Any = llguidance.LLMatcher
        with _translated():
            self._limits = llguidance.LLParserLimits(**_LIMITS)
            self._tokens = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Tokens(tokenizer)),
                eos_token=sorted(tokenizer.end_ids),
            )
        self._compiled = functools.lru_cache(_KEPT)(self._compile)
        self._turns = threading.Semaphore(_AT_ONCE)

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the start of an answer.

        Raises ConstraintError: malformed, not supported, too large, or no text matches.
        """
        with _translated():
            matcher = self._compiled(constraint).deep_copy()
        # The states of a lexer are shared by its matchers and grow with them: those that come
        # after one has reached the limit begin anew.
        return Matcher(matcher, self._tokenizer.vocab_size, self._compiled.cache_clear)

    def _compile(self, constraint: Constraint) -> Any:
        grammar = _OPTIONS + constraint.grammar
        markers = "".join(self._rules(i, marker) for i, marker in enumerate(constraint.markers))
        if constraint.frame:
            grammars = {"whole": _OPTIONS + constraint.frame + markers, "answer": grammar}
            if "marker_" in constraint.grammar:
                grammars["answer"] += markers
            grammar = json.dumps(
                {"grammars": [{"name": n, "lark_grammar": g} for n, g in grammars.items()]}
            )
        else:
            grammar += markers
        return self._in_time(lambda: self._started(grammar))

    def _started(self, grammar: str) -> Any:
        with _translated():
            matcher = self._new_matcher(self._tokens, grammar, log_level=0, limits=self._limits)
            _check(matcher)
            matcher.compute_bitmask()  # some errors are found by the first step only
        _check(matcher)
        return matcher

    def _in_time(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, in a thread that is given up if it takes too long: a call of the
        library cannot be ended, and keeps its turn until it returns.
        """
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
            finally:
                self._turns.release()

        if not self._turns.acquire(timeout=_TIME_LIMIT):
            raise ConstraintError("too many constraints are being compiled: try again")
        threading.Thread(target=run, daemon=True).start()
        try:
            return result.result(_TIME_LIMIT)
        except TimeoutError:
            raise ConstraintError(
                f"the constraint takes longer than {_TIME_LIMIT:g} s to compile: make it simpler"
            ) from None

    def _rules(self, index: int, marker: str) -> str:
        """The rules marker_{index} and until_{index}."""
        token_id = self._tokenizer.control_id(marker)
        if token_id is not None:
            name, lazy = f"<[{token_id}]>", ""
        else:
            name, lazy = json.dumps(marker), "[lazy]"
        return f"\nmarker_{index}: {name}\nuntil_{index}{lazy}: /(?s:.*)/ {name}"


class _Tokens:
    """The vocabulary as llguidance.TokenizerWrapper takes it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [
            i
            for i in range(tokenizer.vocab_size)
            if tokenizer.is_markup(i) or i in tokenizer.end_ids
        ]
        self.eos_token_id = min(tokenizer.end_ids)
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of forced text, which `_OPTIONS` spares."""
        return []


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise ConstraintError(f"the constraint cannot be used: {_one_line(matcher.get_error())}")


@contextmanager
def _translated() -> Iterator[None]:
    """ConstraintError for exceptions of the library, a Rust panic among them."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__.startswith("pyo3"):
            raise ConstraintError(f"the constraint failed: {_one_line(str(error))}") from None
        raise


def _one_line(message: str) -> str:
    words = " ".join(message.split())
    shown = "".join(char if char.isprintable() else "?" for char in words)
    return shown if len(shown) <= _MESSAGE_LIMIT else shown[:_MESSAGE_LIMIT] + "..."
