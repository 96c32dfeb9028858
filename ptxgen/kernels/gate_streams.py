"""A value in each stream of a residual, gated by how much a key is like a query (Qwen 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.streams import STREAMS
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance

THREADS = 128
#: The least square of a root.
LEAST = 1e-6


@dataclass(frozen=True)
class GateStreams(KernelSpec):
    """y[i] (rows, 4, cols) = sigmoid(root(key[i] . query[i] / sqrt(cols))) * value (rows, cols), of
    each stream i; root(s) = sign(s) sqrt(max(|s|, 1e-6))."""

    cols: int
    rows: int = 1

    name = "gate_streams"
    limits = limited(cols=POSITIVE, rows=GRID_ROWS)
    tolerance = Tolerance(rtol=1e-5)

    @property
    def params(self) -> tuple[Param, ...]:
        wide = ("rows", STREAMS, "cols")
        return (
            Param("key", "f32", wide, Access.IN),
            Param("query", "f32", wide, Access.IN),
            Param("value", "f32", ("rows", "cols"), Access.IN),
            Param("y", "f32", wide, Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(STREAMS, self.rows, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        key, query, value = (inputs[name].astype(np.float64) for name in ("key", "query", "value"))
        y = stream_gates(key, query)[:, :, None] * value[:, None]
        return {"y": y.astype(np.float32)}

    @classmethod
    def examples(cls) -> dict[str, GateStreams]:
        return {"few": cls(37, 3), "many": cls(515, 2)}

    def flops(self) -> int:
        return 3 * STREAMS * self.rows * self.cols


def stream_gates(key: Array, query: Array) -> Array:
    """Gates (rows, 4) of keys and queries (rows, 4, cols), in float64."""
    s = np.einsum("rsc,rsc->rs", key, query) / np.sqrt(key.shape[2])
    gates: Array = 1.0 / (1.0 + np.exp(-np.sign(s) * np.sqrt(np.maximum(np.abs(s), LEAST))))
    return gates
