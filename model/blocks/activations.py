"""The vectors between layers, and what is known of the norm that follows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.blocks.arguments import given
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.linear.prologue.gate import Gate

if TYPE_CHECKING:
    from urdir.driver.memory import PinnedBuffer, Slice
    from urdir.model.memory.exchange import RankExchange
    from urdir.ptxgen.kernels.exchange.gives import SumOfRanks
    from urdir.ptxgen.kernels.norm import Norm


@dataclass(frozen=True, slots=True)
class NormedSum:
    """before + norm(delta), both (rows, cols) f32, times ``scale`` (1,) f32 where there is one;
    ``label`` is that of a launch for it."""

    label: str
    cols: int
    delta: Slice
    norm: NormLayer
    before: Slice
    scale: Slice | None = None

    @property
    def after(self) -> Norm:
        """What makes the sum's addend of ``delta``."""
        return self.norm.norm

    @property
    def arguments(self) -> Mapping[str, Slice | PinnedBuffer]:
        """What a launch takes for it beside vectors."""
        norm = self.norm
        return given(post_norm=norm.weight, post_norm_bias=norm.bias, stream_scale=self.scale)


@dataclass(frozen=True, slots=True)
class RanksSum:
    """before + the sum of the ranks' delta, both (cols,) f32, which they have given each other
    (`Gives`); see `NormedSum`."""

    label: str
    cols: int
    delta: Slice
    exchange: RankExchange
    before: Slice
    scale: Slice | None = None

    @property
    def after(self) -> SumOfRanks:
        """What makes the sum's addend of ``delta``."""
        return self.exchange.takes

    @property
    def arguments(self) -> Mapping[str, Slice | PinnedBuffer]:
        """What a launch takes for it beside vectors."""
        names = (param.name for param in self.after.params)
        words = {name: self.exchange.arguments[name] for name in names}
        return words | given(stream_scale=self.scale)


@dataclass(frozen=True, slots=True)
class DueGate:
    """What vectors have yet to go through, in place: `Gate`, with ``x_gate`` (rows, n) and, of a
    norm of heads, ``head_norm`` (head,); ``label`` is that of a launch for it."""

    label: str
    cols: int
    of: Gate
    x_gate: Slice
    head_norm: Slice | None = None


@dataclass(frozen=True, slots=True)
class Activations:
    """Vectors ``x`` (rows, n) f32. The launch that made them may have begun the ``norm`` that
    follows: x times its weights is in ``scaled``, perhaps packed, and a ``summary`` of both
    (`GemmSmall`); or completed it, in ``normed``. Vectors that are ``packed`` (`PackedProduct`)
    have no other form: x is the same buffer.

    Where a sum is ``due`` no launch has made x yet, and where there is a ``gate``, x has yet to go
    through it. Only the next product, which makes x on its way, takes such vectors; anything else
    needs `LinearLayers.complete`.
    """

    x: Slice
    norm: NormLayer | None = None
    scaled: Slice | None = None
    summary: Slice | None = None
    scaled_is_packed: bool = False
    normed: Slice | None = None
    packed: Slice | None = None
    due: NormedSum | RanksSum | None = None
    gate: DueGate | None = None

    def has_begun(self, norm: NormLayer | None) -> bool:
        """Whether the launch that made the vectors has begun this norm."""
        return norm is not None and self.scaled is not None and norm == self.norm

    def has_completed(self, norm: NormLayer | None) -> bool:
        """Whether ``normed`` is what this norm gives."""
        return norm is not None and self.normed is not None and norm == self.norm
