"""Products of many activation vectors on tensor cores, which take them as packed f16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from urdir.model.blocks.activations import Activations
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.linear.pack import Pack
from urdir.ptxgen.kernels.linear.packed_choice import choose_packed
from urdir.ptxgen.kernels.linear.packed_parts import HeadPlaces
from urdir.ptxgen.kernels.normalise import Normalise

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.plan import Plan
    from urdir.ptxgen.kernels.linear.choice import Limits

# One object for equal kernels, with its cached properties.
_choose_packed = lru_cache(maxsize=1024)(choose_packed)
_pack = lru_cache(maxsize=64)(Pack)
_normalise = lru_cache(maxsize=64)(Normalise)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Appends products of ``rows`` vectors to a plan, for a device with these ``limits``.

    ``work["packed"]`` holds the vectors of one product.
    """

    plan: Plan
    work: Arena
    rows: int
    limits: Limits

    def append(
        self,
        label: str,
        matrices: Sequence[tuple[Matrix, Slice]],
        x: Activations,
        norm: NormLayer | None,
        *,
        residual: Slice | None = None,
        up: Matrix | None = None,
        packs: bool = False,
        heads: tuple[HeadPlaces, ...] = (),
        **ends: Any,
    ) -> None:
        """y (rows, out) = the ends of x, after the ``norm``, times the matrix, for each.

        The other arguments are fields of `PackedProduct`.
        """
        (first, _), *others = matrices
        kernel = _choose_packed(
            self.limits,
            first.format,
            first.rows,
            first.cols,
            self.rows,
            bias=tuple(matrix.bias is not None for matrix, _ in matrices),
            residual=residual is not None,
            gated=up is not None,
            others=tuple((matrix.format, matrix.rows) for matrix, _ in others),
            packs=packs,
            heads=heads,
            **ends,
        )
        room = heads[0].room if heads else 0
        launch: dict[str, Slice | None] = {"x": self._packed(label, x, norm, first.cols, room)}
        for number, (matrix, y) in enumerate(matrices):
            n = str(number or "")
            launch |= {f"weights{n}": matrix.data, f"bias{n}": matrix.bias}
            launch[f"y{n}"] = y.slice(0, kernel.nbytes(kernel.param(f"y{n}")))
        if up is not None:
            launch |= {"up": up.data, "up_bias": up.bias}
        launch["residual"] = residual
        given = {name: value for name, value in launch.items() if value is not None}
        length = {"length": self.rows} if heads else {}
        self.plan.launch(kernel, label, **length, **given)

    def _packed(
        self, label: str, x: Activations, norm: NormLayer | None, cols: int, room: int
    ) -> Slice:
        """The vectors of a product, packed: by a launch, unless they are. They may have more
        ``room``."""
        if norm is None and x.packed is not None:
            return x.packed
        packed, source, taken = self.work["packed"], x.x, None
        if norm is not None and x.has_completed(norm):
            assert x.normed is not None
            source = x.normed
        elif norm is not None and Pack.can_norm(cols):
            taken = norm
        elif norm is not None:
            source = self.work["normed"]
            kernel = _normalise(self.rows, cols, norm.norm)
            self.plan.launch(kernel, f"{label}.norm", x=x.x, y=source, **_weights(norm))
        pack = _pack(self.rows, cols, taken and taken.norm, room=room)
        label = f"{label}.norm" if taken else f"{label}.pack"
        weights = {} if taken is None else _weights(taken)
        self.plan.launch(pack, label, x=source, y=packed, **weights)
        return packed


def _weights(norm: NormLayer) -> dict[str, Slice]:
    weights = {"weight": norm.weight, "bias": norm.bias}
    return {name: value for name, value in weights.items() if value is not None}
