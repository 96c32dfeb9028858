"""What a step does and how large it is: the shapes that plans are made for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

from urdir.model.memory.buckets import row_bucket
from urdir.ptxgen.kernels.attention.choice import length_buckets


class Output(Enum):
    """What comes out of a step once the layers are through."""

    NONE = "none"  # of a prompt's chunk with others after it: the next tokens are known
    LOGITS = "logits"  # for the host, which supplies the next token
    GREEDY = "greedy"  # the most likely token becomes the next one
    SAMPLE = "sample"  # a token drawn by the sequence's settings becomes the next one

    @property
    def is_token(self) -> bool:
        """True where the device itself supplies the next token."""
        return self in (Output.GREEDY, Output.SAMPLE)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a plan is made for: everything that is fixed while its graph is replayed.

    ``rows`` tokens a step, each with at most ``keys`` keys to attend to. Those of a prompt step are
    a chunk of one sequence, and the ``output`` is of the last one. ``steps`` decode steps follow
    one another, each with the tokens that the one before has chosen.
    """

    rows: int
    keys: int
    output: Output
    steps: int = 1
    is_prompt: bool = False

    @property
    def kind(self) -> str:
        """The step in words: "greedy", "prompt" (without an output), "prompt greedy"."""
        if self.is_prompt:
            return "prompt" if self.output is Output.NONE else f"prompt {self.output.value}"
        return self.output.value


@dataclass(frozen=True, slots=True)
class ShapeBuckets:
    """The few shapes that serve all steps: rows and lengths are rounded up.

    Every shape costs a graph. ``chunks`` are the rows of prompt steps and ``lengths`` the keys of
    all steps, smallest first.
    """

    chunks: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, chunks: tuple[int, ...], max_len: int) -> ShapeBuckets:
        """The buckets of a session with these prompt steps and room for ``max_len`` tokens."""
        return cls(chunks, tuple(length_buckets(max_len)))

    def keys(self, length: int) -> int:
        """The length bucket of a step after which the longest sequence has ``length`` tokens."""
        return self.lengths[bisect_left(self.lengths, length)]

    def decode(self, rows: int, length: int, output: Output, steps: int = 1) -> StepShape:
        """The shape of ``steps`` steps of ``rows`` sequences, the longest of which then has
        ``length`` tokens.
        """
        return StepShape(row_bucket(rows), self.keys(length), output, steps)

    def prompt(self, start: int, end: int, output: Output = Output.NONE) -> tuple[StepShape, int]:
        """The shape of the first prompt step of the tokens from ``start`` to ``end``, and where it
        ends: not all of them may fit one step, and the ``output`` is that of the last one's step.
        Rows that are left over stay idle.
        """
        rows = next((c for c in self.chunks if c >= end - start), self.chunks[-1])
        if end - start > rows:
            end, output = start + rows, Output.NONE
        return StepShape(rows, self.keys(end), output, is_prompt=True), end
