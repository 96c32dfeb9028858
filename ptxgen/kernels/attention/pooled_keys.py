"""What kernels share that make one key of the keys of several tokens."""

from __future__ import annotations

import numpy as np

from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div


class PooledKeys(KernelSpec):
    """A key of ``layout`` for each of ``rows``: a CTA each."""

    layout: KvLayout
    rows: int

    @property
    def dim(self) -> int:
        """Values of a key."""
        return self.layout.head_dim

    @property
    def warps(self) -> int:
        """Warps of a CTA, whose lanes have eight values each."""
        return ceil_div(self.dim // 8, 32)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32 * self.warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=1e-5 if self.layout.dtype == "f32" else 2e-3)


def params_of_pools(raw: KvLayout, layout: KvLayout) -> tuple[Param, ...]:
    """The cache of tokens' ``raw`` keys, that of keys made of them, and the rows of a step."""
    return (
        Param("raw", raw.element_dtype, raw.shape, Access.IN),
        # only some slots of a cache are written: INOUT, not OUT
        *layout.params(Access.INOUT),
        Param("sequence", "u32", ("rows",), Access.IN),
        Param("position", "u32", ("rows",), Access.IN),
    )


def inputs_of_pools(
    rng: np.random.Generator, raw: KvLayout, layout: KvLayout, pools: Array, tokens: int
) -> dict[str, Array]:
    """Random caches of ``raw`` keys and of those that are made of them, and rows of one sequence:
    the last of the ``tokens`` of each of ``pools``. Of three rows or more the second is a padding
    row, and the third has the token before the last of the second's pool."""
    positions = pools * tokens + tokens - 1
    if len(positions) > 2:
        positions[1:3] = raw.max_len + 3, positions[1] - 1
    table = raw.random_table(rng) if raw.is_paged else None
    lengths = [raw.max_len] * raw.sequences
    return {
        **({} if table is None else {"block_table": table}),
        "raw": raw.random_cache(rng, lengths, table),
        "k_cache": layout.random_cache(rng, lengths, table, byte=0),
        "sequence": np.zeros(len(positions), np.uint32),
        "position": positions.astype(np.uint32),
    }
