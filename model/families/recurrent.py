"""Recurrent mixers: a state of fixed size per sequence instead of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from urdir.model.errors import UnsupportedError
from urdir.model.families.reader import Presence, Reader
from urdir.model.families.stored import Linear, Normalization, Slopes, StoredVector
from urdir.ptxgen.kernels.recurrent.causal_conv import MAX_TAPS, tail_slots

if TYPE_CHECKING:
    from urdir.ptxgen.kernels.recurrent.qkv_rows import Order


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution over tokens, per channel: ``weight`` (channels, ..., taps), ``bias``
    (channels,)."""

    weight: StoredVector
    bias: StoredVector | None = None

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.weight.size // self.taps

    @property
    def taps(self) -> int:
        """Number of tokens that a result depends on, its own included."""
        return self.weight.shape[-1]

    @property
    def tail(self) -> int:
        """Values of earlier tokens that the next token needs."""
        return self.channels * (self.taps - 1)


class Recurrent:
    """A mixer that keeps a state per sequence. It is a frozen dataclass of the places of its
    weights; that of `families/x.py` has its layer in `layers/x.py`. Ranks have all of it unless
    `share_recurrent` cuts it.
    """

    __slots__ = ()
    #: What it is, for printing.
    kind: ClassVar[str] = "recurrent mixer"
    #: The product of its result.
    o: Linear

    @property
    def convolutions(self) -> Mapping[str, Convolution]:
        """Its convolutions over tokens, by the name of their tail in the state."""
        return {}

    @property
    def held(self) -> int:
        """Values of a sequence's recurrence; 0 without one."""
        return 0

    @property
    def state(self) -> Mapping[str, int]:
        """Number of values of a sequence's state, by the kernels' parameter names: a tail of each
        convolution, and what the recurrence holds."""
        tails = {name: conv.tail for name, conv in self.convolutions.items()}
        return {**tails, "state": self.held} if self.held else tails

    def state_with(self, drafts: int) -> Mapping[str, int]:
        """The same where steps verify up to this many drafts of a sequence: tails are rings. Raises
        UnsupportedError for a mixer that cannot verify drafts."""
        tails = {
            name: conv.channels * tail_slots(conv.taps, drafts)
            for name, conv in self.convolutions.items()
        }
        return {**self.state, **tails}


class ConvolvedOnce(Recurrent):
    """A mixer with one convolution."""

    __slots__ = ()
    conv: Convolution

    @property
    def convolutions(self) -> Mapping[str, Convolution]:
        """It, by the name of its tail."""
        return {"tail": self.conv}


@dataclass(frozen=True, slots=True)
class ShortConv(ConvolvedOnce):
    """o (output_gate x * conv(input_gate x * values x)): the mixer of LFM2."""

    values: Linear
    input_gate: Linear
    output_gate: Linear
    conv: Convolution
    o: Linear


@dataclass(frozen=True, slots=True)
class Recurrence(ConvolvedOnce):
    """Linear attention with a decaying state: the mixer of Qwen 3.5 and of Mamba-2,

        o (f(recurrence(silu(conv(mixed x)), alpha x, beta x), gate x))

    The recurrence is `GatedRecurrence`: the gated delta rule with ``beta``, else SSD with a
    ``skip`` (heads,). ``a`` and ``dt_bias`` are (heads,). f(y, z) is norm(y) * g(z), or with
    ``gates_first`` norm(y * g(z)), g being the ``gating``. The ``norm`` is per head, or per group
    with weights (groups, values of a group).
    """

    mixed: Linear
    conv: Convolution
    gate: Linear
    alpha: Linear
    beta: Linear | None
    a: StoredVector
    dt_bias: StoredVector
    skip: StoredVector | None
    norm: Normalization | None
    o: Linear
    heads: int  # value heads
    key_heads: int  # divides heads
    key_dim: int
    value_dim: int
    eps: float = 0.0  # for the L2 norm of queries and keys
    tiled: bool = False  # heads h and h + key_heads share keys, not neighbours
    gates_first: bool = False
    gating: Literal["silu", "sigmoid"] = "silu"

    @property
    def order(self) -> Order:
        """The layout of a row of ``mixed``."""
        return "vkq" if self.beta is None else "qkv"

    @property
    def width(self) -> int:
        """Width of the result."""
        return self.heads * self.value_dim

    @property
    def held(self) -> int:
        """Values of the states of all heads or channels."""
        return self.width * self.key_dim


@dataclass(frozen=True, slots=True)
class Selective(ConvolvedOnce):
    """Mamba's selective scan, with u = silu(conv(mixed x)):

        o (scan(u, step norm(low u), norm(b u), norm(c u)) * silu(gate x))

    The scan is `SelectiveScan`, with ``a`` (channels, size) and ``skip`` (channels,). ``step`` is
    low-rank, from ``low``, and its bias is that of dt. If ``step`` has one row per head, the scan
    is SSD (`GatedRecurrence`): ``a`` and ``skip`` are (heads,), and heads share b and c. Norms are
    optional.
    """

    mixed: Linear
    conv: Convolution
    gate: Linear
    low: Linear
    b: Linear
    c: Linear
    low_norm: Normalization | None
    b_norm: Normalization | None
    c_norm: Normalization | None
    step: Linear
    a: StoredVector
    skip: StoredVector
    o: Linear

    @property
    def size(self) -> int:
        """Values of a channel's state."""
        return self.b.rows

    @property
    def heads(self) -> int:
        """Heads whose channels share one decay; 0: each channel has its own."""
        return self.step.rows if self.step.rows < self.conv.channels else 0

    @property
    def held(self) -> int:
        """Values of the states of all heads or channels."""
        return self.conv.channels * self.size


@dataclass(frozen=True, slots=True)
class Convolved:
    """silu(conv(linear x))."""

    linear: Linear
    conv: Convolution


@dataclass(frozen=True, slots=True)
class KimiDelta(Recurrent):
    """Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a gate per key channel:

        o (norm(recurrence(q, k, v, decay x, beta x)) * sigmoid(gate x))

    The recurrence is `GatedRecurrence` with ``channels``; q, k and v are (heads, dim), ``a`` and
    ``beta`` x are (heads,), ``dt_bias`` is (heads, dim). ``decay`` and ``gate`` may be low-rank
    products, of ``decay_low`` x and ``gate_low`` x. A ``floor`` below 0 is a lower bound of the log
    decay; with ``negated``, -a replaces a. The ``norm`` is per head.
    """

    q: Convolved
    k: Convolved
    v: Convolved
    decay: Linear
    beta: Linear
    gate: Linear
    a: StoredVector
    dt_bias: StoredVector
    norm: Normalization
    o: Linear
    eps: float  # for the L2 norm of queries and keys
    floor: float = 0.0
    negated: bool = False
    decay_low: Linear | None = None
    gate_low: Linear | None = None

    @property
    def parts(self) -> Mapping[str, Convolved]:
        """Inputs of the recurrence, by name."""
        return {"q": self.q, "k": self.k, "v": self.v}

    @property
    def heads(self) -> int:
        """Number of key and value heads."""
        return self.beta.rows

    @property
    def dim(self) -> int:
        """Dimension of a head."""
        return self.decay.rows // self.heads

    @property
    def convolutions(self) -> Mapping[str, Convolution]:
        """Convolutions by the names of their tails."""
        return {f"tail {name}": part.conv for name, part in self.parts.items()}

    @property
    def held(self) -> int:
        """Values of the states of all heads or channels."""
        return self.heads * self.dim * self.dim


@dataclass(frozen=True, slots=True)
class Lightning(Recurrent):
    """Lightning attention (arXiv 2401.04658; MiniMax-01, arXiv 2501.08313): linear attention with
    fixed decays, ``slopes``:

        o (norm(recurrence(silu(q x), silu(k x), silu(v x))) * sigmoid(gate x))

    The recurrence is `GatedRecurrence`, ``steady``; q, k and v are (heads, dim). One ``norm``
    covers all heads.
    """

    q: Linear
    k: Linear
    v: Linear
    gate: Linear
    norm: Normalization
    o: Linear
    slopes: Slopes

    @property
    def parts(self) -> Mapping[str, Linear]:
        """Inputs of the recurrence, by name."""
        return {"q": self.q, "k": self.k, "v": self.v}

    @property
    def heads(self) -> int:
        """Number of key and value heads."""
        return self.slopes.heads

    @property
    def dim(self) -> int:
        """Dimension of a head."""
        return self.q.rows // self.heads

    @property
    def held(self) -> int:
        """Values of the states of all heads or channels."""
        return self.heads * self.dim * self.dim


#: Mixers with `GatedRecurrence`, whose states decay.
Decaying = Recurrence | Selective | KimiDelta | Lightning


def convolution(
    file: Reader, key: str, name: str, layer: int, *channels: int, bias: Presence = "absent"
) -> Convolution:
    """The convolution ``name`` of a layer, stored as (*channels, taps); metadata ``key`` has the
    number of taps. UnsupportedError for a number that the kernels lack."""
    taps = file.size(key)
    if not 2 <= taps <= MAX_TAPS:
        raise UnsupportedError(f"{file.key(key)} is {taps}; 2 to {MAX_TAPS} are supported")
    has_bias = bias == "optional" and file.anywhere(f"{name}.bias")
    return Convolution(
        file.vector(f"{name}.weight", layer, *channels, taps),
        file.vector(f"{name}.bias", layer, *channels) if has_bias else None,
    )
