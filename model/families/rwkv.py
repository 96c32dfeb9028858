"""The networks of RWKV, described: time mixing, which has a state, and channel mixing.

Both read mixes of a token with the one before it, n + mix * (before - n), n being the norm of the
stream: `shift` has the mixes, (hidden,) each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from urdir.model.errors import UnsupportedError
from urdir.model.families.recurrent import Recurrent
from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.wkv import Kind


@dataclass(frozen=True, slots=True)
class LowRank:
    """up f(down x); the bias of ``up`` is that of the whole."""

    down: Linear
    up: Linear
    activation: Activation | None = None


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Mixes that depend on the token: mix i is that of the shift plus up[i] tanh(down[i] x), x
    being the mix by ``first`` (hidden,)."""

    first: StoredVector
    down: tuple[Linear, ...]
    up: tuple[Linear, ...]


class Mix(Recurrent):
    """A mixer of RWKV."""

    __slots__ = ()

    def state_with(self, drafts: int) -> Mapping[str, int]:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"drafts of a model with {self.kind} are not supported")


@dataclass(frozen=True, slots=True)
class TimeMix(Mix):
    """o (wkv(r x_r, k x_k, v x_v, decay x_w, ...) * gate x_g), see `ptxgen.kernels.recurrent.wkv`;
    x_r ... are the mixes in that ``order``, by their letters.

    RWKV 7: ``rate`` x_a, and ``residual`` x_v, which mixes v with that of the first layer, if it
    is given; the vectors key_scale, key_rate and bonus (hidden,). RWKV 6: bonus alone, if it is
    given, and ``dynamic`` mixes. The ``norm`` is per head, with weights (hidden,).
    """

    kind: ClassVar = "time mixing"

    variant: Kind
    heads: int
    shift: tuple[StoredVector, ...]
    order: str
    r: Linear
    k: Linear
    v: Linear
    decay: LowRank
    gate: LowRank | Linear | None
    norm: Normalization | None
    o: Linear
    bonus: StoredVector | None = None
    rate: LowRank | None = None
    residual: LowRank | None = None
    key_scale: StoredVector | None = None
    key_rate: StoredVector | None = None
    dynamic: Dynamic | None = None
    names_values: bool = False  # v is what the residuals of later layers read

    @property
    def dim(self) -> int:
        """Dimension of a head."""
        return self.r.rows // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of k and v."""
        return self.k.rows // self.dim

    @property
    def state(self) -> Mapping[str, int]:
        """Number of values of a sequence's state, by the kernels' parameter names."""
        return {"shift": self.r.cols, "state": self.heads * self.dim**2}


@dataclass(frozen=True, slots=True)
class ChannelMix(Mix):
    """o relu(key x_k)^2, times sigmoid(receptance x_r) if that is given (RWKV 6)."""

    kind: ClassVar = "channel mixing"

    shift: tuple[StoredVector, ...]
    key: Linear
    o: Linear
    receptance: Linear | None = None

    @property
    def state(self) -> Mapping[str, int]:
        """Number of values of a sequence's state, by name."""
        return {"channel shift": self.key.cols}
