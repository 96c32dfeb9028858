"""Mixtures of experts on the device, and the buffers that they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.gemm import tile_height
from urdir.ptxgen.kernels.experts.group import most_tiles
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.linear.choice import takes_gemm

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


@dataclass(frozen=True, slots=True)
class RouterLayer:
    """A router on the device: its ``matrix`` (experts, hidden), perhaps with a bias, and vectors
    (experts,) f32 where the ``selection`` has them. ``scale`` multiplies products before the bias.
    """

    selection: Selection
    matrix: Matrix
    choice_bias: Slice | None = None
    expert_scale: Slice | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MixtureLayer:
    """The experts on the device. The matrices have the rows of all experts, one after the other,
    and so have their biases. Without a ``gate``, down(f(up x)). ``weigh_input``: an expert's weight
    multiplies its gate and up products, not its result (Llama 4).
    """

    selection: Selection
    up: Matrix
    down: Matrix
    gate: Matrix | None
    activation: Activation
    weigh_input: bool = False

    @property
    def width(self) -> int:
        """Values between the matrices of an expert."""
        return self.up.rows // self.selection.experts

    @property
    def hidden(self) -> int:
        """Values of a result."""
        return self.down.rows // self.selection.experts


def mixture_workspace(
    selection: Selection, width: int, hidden: int, rows: int, exact: bool
) -> dict[str, int]:
    """Bytes of the buffers that mixtures of this shape use, for steps of up to ``rows``.

    "experts arrived" must be filled with zeros once; launches leave it so.
    """
    pairs = rows * selection.used
    sizes = {
        "experts arrived": 4 * rows,
        "router logits": 4 * rows * selection.experts,
        "expert": 4 * pairs,
        "expert weight": 4 * pairs,
        "expert gate": 4 * pairs * width,
        "expert up": 4 * pairs * width,
    }
    if takes_gemm(rows, exact):
        counts = [1 << power for power in range(rows.bit_length())] + [rows]
        sizes["expert pair"] = 4 * pairs
        sizes["expert tiles"] = 16 * max(_tiles(selection, count) for count in counts)
        sizes["expert out"] = 4 * pairs * hidden
    return sizes


def most_workspace(sizes: Iterable[dict[str, int]]) -> dict[str, int]:
    """The largest of each buffer."""
    most: dict[str, int] = {}
    for each in sizes:
        for name, nbytes in each.items():
            most[name] = max(nbytes, most.get(name, 0))
    return most


def _tiles(selection: Selection, rows: int) -> int:
    height = tile_height(rows, selection.experts, selection.used)
    return most_tiles(rows, selection.experts, selection.used, height)
