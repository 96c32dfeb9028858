"""How prompts of latent attention walk over what is cached, in blocks of keys and values of heads.

The segments of a step attend to their sequences from the first token on. The keys of these follow
one another, each sequence's in whole units; many units are a block, which is written out, attended
to and overwritten by the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
import numpy.typing as npt

from urdir.model.families.config import Config
from urdir.ptxgen.kernels.attention.choice import block_attention
from urdir.ptxgen.spec import ceil_div

Words = npt.NDArray[np.uint32]

#: GPUs of this native target walk; others have room for it, too.
TARGET = "sm_90a"
#: Steps that as many tokens take as a step of the model may have rows of prompts, and those of the
#: largest block. 2,048 rows of DeepSeek-V2-Lite after 30,000 tokens take 77.6 ms with blocks of two
#: steps, 71.1 of four, 68.5 of eight (an H200).
STEPS_OF_CHUNK, MOST_STEPS = 2, 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """``count`` blocks of ``length`` tokens each, in the place of one of ``room`` tokens."""

    count: int
    length: int
    room: int

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return self.count * self.length


#: Of a step whose prompts do not walk.
NO_BLOCKS = Blocks(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Walk:
    """Units of ``unit`` tokens of one sequence; blocks of up to ``room`` times ``step`` tokens. A
    sequence of the most tokens takes ``most`` steps. Segments begin at multiples of ``rows`` rows
    of prompts."""

    unit: int
    step: int
    room: int
    most: int
    rows: int

    @classmethod
    def of(cls, config: Config, max_len: int, chunk: int, target: str = TARGET) -> Self | None:
        """That of sequences of up to ``max_len`` tokens in steps of up to ``chunk`` rows of prompts
        on a device of native ``target``; None where there is none."""
        walks = set()
        for form in {form for mixer in config.attentions if (form := mixer.written_out)}:
            dims = form.key_dim, form.value_dim
            kernel = block_attention(
                form.heads, dims, max_len, chunk, chunk, target, scores=form.scores
            )
            if kernel is None:
                continue
            unit = kernel.key_tile
            step = unit * ceil_div(chunk, STEPS_OF_CHUNK * unit)
            walks.add(cls(unit, step, MOST_STEPS, ceil_div(max_len, step), kernel.segment_rows))
        # layers of different heads would want different units
        return walks.pop() if len(walks) == 1 else None

    @property
    def most_tokens(self) -> int:
        """Tokens of a walk over a whole sequence."""
        return self.most * self.step

    @property
    def block(self) -> int:
        """Tokens of the largest block."""
        return self.room * self.step

    def padded(self, length: int) -> int:
        """Tokens that a sequence of ``length`` takes in a walk."""
        return self.unit * ceil_div(length, self.unit)

    def blocks(self, lengths: Sequence[int]) -> Blocks:
        """The blocks of a step over sequences of these lengths. Their tokens are rounded up to few
        numbers, as each takes a graph, but not far: there is work for every block."""
        tokens = sum(map(self.padded, lengths))
        if tokens <= self.step:
            return Blocks(1, next(part for part in self._parts if part >= tokens), self.block)
        steps = ceil_div(tokens, self.step)
        steps = min(_few(steps), max(steps, self.most))
        count = ceil_div(steps, self.room)
        return Blocks(count, ceil_div(steps, count) * self.step, self.block)

    def ends(self, longest: int) -> Iterator[int]:
        """Lengths of a sequence whose walks are all that there are up to ``longest`` tokens."""
        yield from (part for part in self._parts if part < longest)
        steps = 2
        while (end := steps * self.step) < longest:
            yield end
            steps = _few(steps + 1)
        yield longest

    @property
    def _parts(self) -> tuple[int, ...]:
        """Tokens of blocks of few: a quarter of a step, a half, a whole one."""
        return self.padded(self.step // 4), self.padded(self.step // 2), self.step

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these lengths have no more tokens than a whole one."""
        return sum(map(self.padded, lengths)) <= self.most_tokens

    def begins(self, lengths: Sequence[int]) -> list[int]:
        """Where in the walk each sequence begins."""
        return [*accumulate(map(self.padded, lengths), initial=0)][:-1]

    def units(self, tokens: int, ends: Sequence[tuple[int, int]]) -> Words:
        """The units (n, 4) u32 of a walk of so many ``tokens`` over sequences, each to its end, as
        `CachedTokens` has them."""
        units = np.zeros((tokens // self.unit, 4), np.uint32)
        begins = self.begins([end for _, end in ends])
        for begin, (sequence, end) in zip(begins, ends, strict=True):
            first = np.arange(0, end, self.unit)
            own = units[begin // self.unit :][: len(first)]
            own[:, 0], own[:, 1] = sequence, first
            own[:, 2] = np.minimum(end - first, self.unit)
        return units

    def most_units(self, segments: int) -> int:
        """Units of the longest walk of a step of so many segments."""
        steps = segments * self.most
        return (steps + ceil_div(steps, self.room)) * self.step // self.unit


def _few(steps: int) -> int:
    """The next number whose binary digits are zeros after the first three."""
    unit = 1 << max(0, (steps - 1).bit_length() - 3)
    return unit * ceil_div(steps, unit)
