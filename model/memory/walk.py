"""How prompts of latent attention walk over what is cached, in blocks of keys and values of heads.

The segments of a step attend to their sequences from the first token on. The keys of these follow
one another, each sequence's in whole units; a few units are a block, which is written out, attended
to and overwritten by the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Walk:
    """Blocks of ``block`` tokens, units of ``unit`` tokens of one sequence. A sequence of the most
    tokens has ``most`` blocks. Segments begin at multiples of ``rows`` rows of prompts."""

    block: int
    unit: int
    most: int
    rows: int

    @classmethod
    def of(cls, config: Config, max_len: int, chunk: int, target: str = TARGET) -> Self | None:
        """That of sequences of up to ``max_len`` tokens in steps of up to ``chunk`` rows of prompts
        on a device of native ``target``; None where there is none."""
        forms = {form for mixer in config.attentions if (form := mixer.written_out) is not None}
        found = {
            block_attention(
                *(form.heads, (form.key_dim, form.value_dim), max_len, chunk, chunk, target),
                scores=form.scores,
            )
            for form in forms
        }
        walks = set()
        for kernel in found - {None}:
            assert kernel is not None
            block = kernel.layout.max_len
            most = ceil_div(max_len, block)
            walks.add(cls(block, kernel.key_tile, most, kernel.segment_rows))
        # layers of different heads would want different units
        return walks.pop() if len(walks) == 1 else None

    @property
    def most_tokens(self) -> int:
        """Tokens of a walk over a whole sequence."""
        return self.most * self.block

    def padded(self, length: int) -> int:
        """Tokens that a sequence of ``length`` takes in a walk."""
        return self.unit * ceil_div(length, self.unit)

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of the blocks of a step over sequences of these lengths. They are rounded up to
        few numbers, as each takes a graph, but not far: there is work for every block."""
        blocks = ceil_div(sum(map(self.padded, lengths)), self.block)
        return self.block * min(_few(blocks), max(blocks, self.most))

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
        return segments * self.most_tokens // self.unit


def _few(blocks: int) -> int:
    """The next power of two, or one and a half of one."""
    power = 1 << (blocks - 1).bit_length()
    return power * 3 // 4 if 4 * blocks <= 3 * power and power > 2 else power
