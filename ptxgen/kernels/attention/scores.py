"""What happens between q . k and the softmax: the description that kernels and models share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, Param

#: From a score to the exponent of 2.
LOG2E = math.log2(math.e)

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a row at position p, and the keys that it attends to: first_key(p) ... p, or
    with ``texts`` those between bounds that are given for each row.

    s = scale * (q . k); then cap * tanh(s / cap); then s + slope[h] * (key - p). A field at its
    default is off and costs nothing.

    - ``scale`` None: 1 / sqrt(head_dim);
    - ``softcap`` c: Gemma 2;
    - ``window`` n: the last n keys, the row's own among them (Beltagy et al. 2020, 2004.05150);
    - ``chunk`` n: keys from the last multiple of n on (Llama 4); a window counts as well;
    - ``sinks``: a logit for each head takes part in the softmax's maximum and sum, without a value
      (GPT-OSS; Xiao et al. 2023, arXiv 2309.17453). Kernels take ``sinks`` (heads,) f32;
    - ``max_bias``: ALiBi (Press et al. 2021, arXiv 2108.12409), slopes as ggml's ``soft_max_ext``;
    - ``causal`` False: keys after p, too, which kernels take as ``texts``. A window of n then has
      n // 2 keys on either side;
    - ``texts``: the rows are whole texts side by side in one sequence. Key r is row r's own, and
      row r attends to keys ``begin[r]`` ... ``position[r]``. Kernels take ``begin`` (rows,) u32.
      ALiBi counts the distance to either side;
    - ``relative`` n: ``relative[h, d + n]`` is added for a key at a distance d from -n to n (T5;
      Raffel et al. 2019, arXiv 1910.10683); further keys have the value of +-n. Kernels take
      ``relative`` (heads, 2 n + 1) f32.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int = 0
    chunk: int = 0
    sinks: bool = False
    max_bias: float = 0.0
    causal: bool = True
    texts: bool = False
    relative: int = 0

    log2e: ClassVar[float] = LOG2E

    def __post_init__(self) -> None:
        if self.window < 0 or not self.softcap >= 0:
            raise PtxgenError(f"window {self.window} and softcap {self.softcap} are 0 or positive")
        if self.chunk < 0 or not 0 <= self.max_bias < math.inf:
            raise PtxgenError(f"chunk {self.chunk} and max_bias {self.max_bias} are 0 or positive")
        if self.relative < 0 or (self.texts and self.span):
            raise PtxgenError(
                f"relative {self.relative} is 0 or positive; the keys of texts have bounds, "
                f"no window or chunk ({self.span})"
            )

    @property
    def span(self) -> int:
        """The most keys that a row attends to; 0: all up to its own."""
        return min(filter(None, (self.window, self.chunk)), default=0)

    @property
    def skips(self) -> bool:
        """Whether a row may not attend to keys before its own."""
        return self.texts or self.span > 0

    def bounds(self, starts: Array, ends: Array) -> tuple[Array, Array]:
        """``begin`` and ``position`` (rows,) u32 of rows side by side, where row r is of the text
        of rows ``starts[r]`` ... ``ends[r] - 1``."""
        own = np.arange(len(starts), dtype=np.int64)
        first, last = starts.astype(np.int64), ends.astype(np.int64) - 1
        if self.causal:
            begin = first if not self.window else np.maximum(first, own - self.window + 1)
            if self.chunk:
                begin = np.maximum(begin, own - (own - first) % self.chunk)
            return begin.astype(np.uint32), own.astype(np.uint32)
        if self.window:
            half = self.window // 2
            first, last = np.maximum(first, own - half), np.minimum(last, own + half)
        return first.astype(np.uint32), last.astype(np.uint32)

    def first_key(self, position: int) -> int:
        """The first key that a row at ``position`` attends to."""
        first = max(0, position - self.window + 1) if self.window else 0
        return max(first, position - position % self.chunk) if self.chunk else first

    def scale_of(self, head_dim: int) -> float:
        """The factor of q . k for heads of ``head_dim`` values."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    def query_scale(self, head_dim: int) -> float:
        """The factor of queries, after which q . k is an exponent of 2 in the softmax. With a
        soft-cap, scores s become 2 s / cap in units of it, the argument of its tanh."""
        return self.scale_of(head_dim) * LOG2E * (2.0 / self.softcap if self.softcap else 1.0)

    @property
    def cap_exponent(self) -> float:
        """The soft-cap, in units of the exponent of 2."""
        return self.softcap * LOG2E

    @property
    def params(self) -> tuple[Param, ...]:
        """What kernels take: the logits of sinks, the first keys of rows of texts, the bias by
        distance."""
        distances = 2 * self.relative + 1
        return Param.given(
            self.sinks and Param("sinks", "f32", ("heads",), Access.IN),
            self.texts and Param("begin", "u32", ("rows",), Access.IN),
            self.relative and Param("relative", "f32", ("heads", distances), Access.IN),
        )

    def slope_exponents(self, heads: int) -> tuple[int, float, float]:
        """ALiBi's slopes as powers of 2: (n, a, b) with slope[h] = 2^(a * (h + 1)) for h < n, the
        largest power of two up to ``heads``, and 2^(b * (2 * (h - n) + 1)) from there on."""
        count = 1 << heads.bit_length() - 1
        return count, -self.max_bias / count, -self.max_bias / 2 / count

    def slopes(self, heads: int) -> Float64s:
        """ALiBi's slope of every head, (heads,); zeros where it is off."""
        if not self.max_bias:
            return np.zeros(heads)
        count, first, second = self.slope_exponents(heads)
        head = np.arange(heads)
        return np.exp2(
            np.where(head < count, first * (head + 1), second * (2 * (head - count) + 1))
        )

    def __call__(self, products: Array, keys: Array, position: int, head_dim: int) -> Float64s:
        """The scores (kv_heads, group, n) of products q . k, for ``keys`` (n,), in float64."""
        scores = np.asarray(products, np.float64) * self.scale_of(head_dim)
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        if self.max_bias:
            kv_heads, group, _ = scores.shape
            slopes = self.slopes(kv_heads * group).reshape(kv_heads, group, 1)
            distance = np.asarray(keys, np.float64) - position
            scores = scores + slopes * (-np.abs(distance) if self.texts else distance)
        return scores


#: Nothing but the usual scale.
PLAIN = Scores()
