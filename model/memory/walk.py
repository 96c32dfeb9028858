"""Chunked-context MLA prefill: cached latents are expanded block by block to keys and values per
head.

The segments of a step attend to their sequences from the first token on. The cached tokens of these
sequences follow one another, each sequence in whole units; a block is many units, which are
expanded, attended to, and overwritten by the next block.
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

#: Native target of GPUs that use it; others reserve the memory as well.
TARGET = "sm_90a"
#: Tokens of a step with the maximum prompt rows, and of the largest block, in such steps. 2,048
#: rows of DeepSeek-V2-Lite after 30,000 tokens take 77.6 ms with blocks of two steps, 71.1 of four,
#: 68.5 of eight (an H200).
STEPS_OF_CHUNK, MOST_STEPS = 2, 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """``count`` blocks of ``length`` tokens each, in memory for one of ``room`` tokens."""

    count: int
    length: int
    room: int

    @property
    def tokens(self) -> int:
        """Tokens of all blocks."""
        return self.count * self.length


#: For steps without chunked-context prefill.
NO_BLOCKS = Blocks(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Walk:
    """Units of ``unit`` tokens of one sequence; blocks of up to ``room`` times ``step`` tokens. The
    longest sequence takes ``most`` steps. Segments start at multiples of ``rows`` prompt rows."""

    unit: int
    step: int
    room: int
    most: int
    rows: int

    @classmethod
    def of(cls, config: Config, max_len: int, chunk: int, target: str = TARGET) -> Self | None:
        """The walk for sequences of up to ``max_len`` tokens in steps of up to ``chunk`` prompt
        rows on a device of native ``target``; None if unsupported."""
        walks = set()
        for form in {form for mixer in config.attentions if (form := mixer.written_out)}:
            dims = form.key_dim, form.value_dim
            kernel = block_attention(
                form.heads, dims, max_len, chunk, chunk, target, scores=form.scores
            )
            if kernel is None:
                continue
            unit = kernel.cta.key_tile
            step = unit * ceil_div(chunk, STEPS_OF_CHUNK * unit)
            walks.add(cls(unit, step, MOST_STEPS, ceil_div(max_len, step), kernel.segment_rows))
        # layers with different heads would need different units
        return walks.pop() if len(walks) == 1 else None

    @property
    def most_tokens(self) -> int:
        """Tokens of a walk over the longest sequence."""
        return self.most * self.step

    @property
    def block(self) -> int:
        """Tokens of the largest block."""
        return self.room * self.step

    def padded(self, length: int) -> int:
        """Tokens that a sequence of ``length`` takes, rounded up to units."""
        return self.unit * ceil_div(length, self.unit)

    def blocks(self, lengths: Sequence[int]) -> Blocks:
        """The blocks of a step over sequences of these lengths. Token counts are rounded up to a
        few values, as each needs a graph, but not far: no block is empty."""
        tokens = sum(map(self.padded, lengths))
        if tokens <= self.step:
            return Blocks(1, next(part for part in self._parts if part >= tokens), self.block)
        steps = ceil_div(tokens, self.step)
        steps = min(_few(steps), max(steps, self.most))
        count = ceil_div(steps, self.room)
        return Blocks(count, ceil_div(steps, count) * self.step, self.block)

    def ends(self, longest: int) -> Iterator[int]:
        """Sequence lengths that produce every distinct walk of up to ``longest`` tokens."""
        yield from (part for part in self._parts if part < longest)
        steps = 2
        while (end := steps * self.step) < longest:
            yield end
            steps = _few(steps + 1)
        yield longest

    @property
    def _parts(self) -> tuple[int, ...]:
        """Token counts of blocks for short walks: a quarter of a step, a half, a whole one."""
        return self.padded(self.step // 4), self.padded(self.step // 2), self.step

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these lengths together are not longer than the longest one."""
        return sum(map(self.padded, lengths)) <= self.most_tokens

    def begins(self, lengths: Sequence[int]) -> list[int]:
        """The start of each sequence in the walk."""
        return [*accumulate(map(self.padded, lengths), initial=0)][:-1]

    def units(self, tokens: int, ends: Sequence[tuple[int, int]]) -> Words:
        """The units (n, 4) u32 of a walk of ``tokens`` tokens over sequences up to their ends, as
        in `CachedTokens`."""
        units = np.zeros((tokens // self.unit, 4), np.uint32)
        begins = self.begins([end for _, end in ends])
        for begin, (sequence, end) in zip(begins, ends, strict=True):
            first = np.arange(0, end, self.unit)
            own = units[begin // self.unit :][: len(first)]
            own[:, 0], own[:, 1] = sequence, first
            own[:, 2] = np.minimum(end - first, self.unit)
        return units

    def most_units(self, segments: int) -> int:
        """Units of the longest walk of a step of ``segments`` segments."""
        steps = segments * self.most
        return (steps + ceil_div(steps, self.room)) * self.step // self.unit


def _few(steps: int) -> int:
    """The next number with zeros after its first three binary digits."""
    unit = 1 << max(0, (steps - 1).bit_length() - 3)
    return unit * ceil_div(steps, unit)
