"""Argmax of logits by slices: greedy sampling up to its last comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN
from urdir.ptxgen.limits import GRID_ROWS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

#: A rank above that of any number; its index is INVALID_TOKEN.
INVALID_RANK = np.uint64(0xFFFFFFFF << 32)


@dataclass(frozen=True)
class Argmax(KernelSpec):
    """The rank of the largest logit of every slice of each row; ties go to the lowest index.

    A row of ``n`` logits is cut into slices of ``width`` (the last may be shorter), one CTA each. A
    rank (`ranks`) orders logits by value, then by index in the row, so that the highest rank of a
    row is its argmax, which Advance finds. If no token can be chosen, the index of that rank is
    INVALID_TOKEN: a slice with a NaN or +inf has a rank above all others (INVALID_RANK), and one of
    only -inf the lowest rank of -inf.
    """

    n: int
    rows: int = 1
    width: int = 1024

    name = "argmax"
    limits = limited(n=range(1, 1 << 30), rows=GRID_ROWS, width=(1024, 2048, 4096))
    params = (
        Param("logits", "f32", ("rows", "n"), Access.IN),
        Param("ranks", "u64", ("rows", "slices"), Access.OUT),
    )

    @property
    def launch_fields(self) -> frozenset[str]:
        return frozenset({"rows"} if self.rows > 1 else ())

    @property
    def slices(self) -> int:
        """Slices per row: CTAs and ranks."""
        return ceil_div(self.n, self.width)

    @property
    def vector(self) -> int:
        """Logits per access: four if every row stays 16-byte aligned."""
        return 4 if self.rows == 1 or self.n % 4 == 0 else 1

    @property
    def loads(self) -> int:
        """Accesses per thread."""
        return ceil_div(min(self.n, self.width), self.vector * self.launch_shape.threads)

    @property
    def launch_shape(self) -> LaunchShape:
        warps = min(8, ceil_div(self.n, 4 * 32))
        return LaunchShape(grid=(self.slices, self.rows, 1), block=(32 * warps, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        logits = inputs["logits"]
        best = np.zeros((self.rows, self.slices), np.uint64)
        for s in range(self.slices):
            part = logits[:, s * self.width : (s + 1) * self.width]
            value = part.max(axis=1)  # NaN propagates to the maximum
            none = np.isnan(value) | (value == np.inf)
            index = np.where(value == -np.inf, INVALID_TOKEN, part.argmax(axis=1) + s * self.width)
            best[:, s] = np.where(none, INVALID_RANK, ranks(np.where(none, 0, value), index))
        return {"ranks": best}

    @classmethod
    def examples(cls) -> dict[str, Argmax]:
        return {
            "one logit": cls(n=1),
            "odd": cls(n=33),
            "few": cls(n=130),
            "one slice": cls(n=1003),
            "short last slice": cls(n=20_001),  # the last slice is short, and so is its last access
            "large vocabulary": cls(n=128_256),
            "aligned rows": cls(n=4100, rows=3),
            "unaligned rows": cls(n=4099, rows=3),  # rows that are not aligned: one logit at a time
            "narrow slices": cls(n=10_242, width=4096),
        }

    def flops(self) -> int:
        return self.rows * self.n

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Logits on a coarse grid, so that the largest repeats, and a NaN or infinity in some
        slices."""
        shape = (self.rows, self.n)
        logits = np.round(4 * rng.standard_normal(shape)).astype(np.float32)
        logits[rng.random(shape) < 0.01] = -np.inf
        for s in range(1, self.slices, 3):
            at = (rng.integers(self.rows), rng.integers(s * self.width, self.n))
            logits[at] = rng.choice([np.nan, np.inf, -np.nan])
        return {"logits": logits}


def ranks(values: Array, indices: Array) -> Array:
    """u64 that order f32 ``values`` (no NaN); of equal ones the lowest of ``indices`` ranks
    highest.

    The upper half is the value's bits, mapped to compare as unsigned integers; the lower half is
    the complement of the index. No rank is 0.
    """
    bits = (np.asarray(values, np.float32) + np.float32(0)).view(np.uint32)
    keys = bits ^ np.where(bits >> 31, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    complements = ~np.asarray(indices).astype(np.uint32)
    return np.asarray(keys.astype(np.uint64) << np.uint64(32) | complements)


def indices(of: Array) -> Array:
    """The u32 indices of ranks."""
    return ~of.astype(np.uint32)
