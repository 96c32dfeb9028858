"""Rotate the last values of heads, forwards or back (DeepSeek V4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.rotation import Rotation, frequencies, turns_table
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128


@dataclass(frozen=True)
class TurnTail(KernelSpec):
    """y (rows, heads, dim) = x with the last values of each head rotated by the row's position, or
    ``back`` by as much. Pairs are neighbours; the rotation has a magnitude of 1."""

    rows: int
    heads: int
    dim: int
    rotation: Rotation
    back: bool = False

    name = "turn_tail"
    limits = limited(rows=GRID_ROWS, heads=POSITIVE)
    tolerance = Tolerance(rtol=2e-6)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tail(self.name, self.rotation, self.dim, 2)

    @property
    def params(self) -> tuple[Param, ...]:
        heads = ("rows", "heads", "dim")
        return (
            Param("x", "f32", heads, Access.IN),
            self.rotation.param,
            Param("position", "u32", ("rows",), Access.IN),
            Param("y", "f32", heads, Access.OUT),
        )

    @property
    def pairs(self) -> int:
        """Pairs of values in a head."""
        return self.dim // 2

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.heads * self.pairs, THREADS)
        return LaunchShape(grid=(ctas, self.rows, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        y = inputs["x"].astype(np.float64)
        sign = -1 if self.back else 1
        table = inputs["frequencies"]
        turned = turned_tail(y, self.rotation, inputs["position"], table, sign)
        return {"y": turned.astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs = super().make_inputs(rng)
        radians = frequencies(self.rotation.rotary_dim, 10000.0)[0]
        positions = rng.integers(0, 100_000, self.rows).astype(np.uint32)
        return inputs | {"frequencies": turns_table(radians), "position": positions}

    @classmethod
    def examples(cls) -> dict[str, TurnTail]:
        return {
            "heads": cls(3, 5, 64, Rotation(32, "interleaved")),
            "back": cls(2, 2, 40, Rotation(6, "interleaved"), back=True),
            "all of it": cls(2, 1, 16, Rotation(16, "interleaved")),
        }

    def flops(self) -> int:
        return 3 * self.rows * self.heads * self.rotation.rotary_dim


def check_tail(name: str, rotation: Rotation, dim: int, unit: int) -> None:
    """Raise PtxgenError unless the last values of heads of ``dim`` can rotate, in groups of
    ``unit``."""
    turned = rotation.rotary_dim
    fits = turned <= dim and dim % unit == 0 and turned % unit == 0
    # in f32: YaRN's magnitude times its own reciprocal may be off by a bit of a double
    if not fits or rotation.style != "interleaved" or np.float32(rotation.magnitude) != 1.0:
        raise PtxgenError(
            f"{name}: the last {turned} of {dim} values, multiples of {unit}, rotate as neighbours "
            "with a magnitude of 1"
        )


def turned_tail(
    x: Array, rotation: Rotation, positions: Array, table: Array, sign: int = 1
) -> Array:
    """x (rows, heads, dim) with its last values rotated, float64."""
    start = x.shape[-1] - rotation.rotary_dim
    turned = rotation.turn(x[..., start:], positions, table, sign)
    return np.concatenate([x[..., :start], turned], axis=-1)
