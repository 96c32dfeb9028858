"""Logit processors: code of the caller that changes logits before tokens are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from urdir.model.engine.sampling import Logits


class LogitRow(NamedTuple):
    """An answer whose next token is about to be chosen: token ids of its ``prompt``, and of the
    ``answer`` so far; of an encoder-decoder the prompt is what begins the decoder's text."""

    prompt: Sequence[int]
    answer: Sequence[int]


class LogitProcessor(ABC):
    """Changes the logits of answers, on the host, before anything else does.

    Derive from it, and give objects as ``processors`` of `Engine.generate`, `Engine.chat` and their
    kin, or of a `Request`:

        class NoRepeats(LogitProcessor):
            def process(self, rows: Sequence[LogitRow], logits: Logits) -> None:
                for row, of in zip(rows, logits, strict=True):
                    of[list(row.answer)] = -np.inf

    Processors of an answer come one after the other, in the order given. Biases, penalties,
    constraints and filters follow; ``logprobs`` are of the processed logits. One object may serve
    any number of answers, also at once; an object that keeps state between the tokens of an answer
    serves one answer.
    """

    @abstractmethod
    def process(self, rows: Sequence[LogitRow], logits: Logits) -> None:
        """Change ``logits`` (len(rows), n_vocab) f32 in place: row i of them is of ``rows[i]``.

        It is called once for each token of an answer, with all rows of a step whose answers have
        this object at the same place of their ``processors``. ``-inf`` forbids a token. What it
        raises ends these answers and no others, as does a row without a finite maximum. The calling
        thread is that of the step: the caller's own for `Engine.generate` and `Engine.chat`, else
        one of the engine.
        """
