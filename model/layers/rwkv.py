"""Time mixing and channel mixing of RWKV as operations."""

from __future__ import annotations

from collections.abc import Mapping

from urdir.model.families.rwkv import ChannelMix, LowRank, TimeMix
from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.model.graph.ops import Activate, Gate
from urdir.model.graph.rwkv import LowRanks, Shift, Wkv
from urdir.model.graph.tensor import BRANCH, Tensor
from urdir.model.layers.builder import LayerOps
from urdir.ptxgen.kernels.activation import Activation

#: The name of the first layer's values.
FIRST = "first values"


def time_mix(
    at: LayerOps, mixer: TimeMix, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * o (wkv(...)), of mixes of the norm of x; see `TimeMix`."""
    x = at.norm("attn_norm", x, norm, "shifted")
    dynamic = _dynamic(at, mixer, x)
    names = [f"mix {of}" for of in mixer.order]
    mixed = shifted(at, "time_mix_shift", x, mixer.shift, names, "shift", dynamic)
    by = dict(zip(mixer.order, mixed, strict=True))
    made = {
        "r": at.product("time_mix_receptance", by["r"], mixer.r, "time r"),
        "k": at.product("time_mix_key", by["k"], mixer.k, "time k"),
    }
    name = FIRST if mixer.names_values else "time v"
    made["v"] = at.product("time_mix_value", by["v"], mixer.v, name)
    if mixer.names_values:
        at.step.saved[FIRST] = made["v"]
    if isinstance(mixer.gate, Linear):
        made["gate"] = at.product("time_mix_gate", by["g"], mixer.gate, "time gate")
    made |= _low_ranks(at, mixer, by)
    if mixer.residual is not None:
        made["first"] = at.step.saved[FIRST]
    y = Tensor("heads", x.rows, mixer.r.rows)
    label = at.name("time_mix")
    y = at.graph.add(Wkv(label, y, tuple(made.values()), tuple(made), mixer, at.index))
    return at.finish("time_mix_output", y, mixer.o, scale)


def channel_mix(
    at: LayerOps, mixer: ChannelMix, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * o relu(key x_k)^2, gated where there is a receptance; see `ChannelMix`."""
    x = at.norm("ffn_norm", x, norm, "shifted")
    names = ["mix k", "mix r"][: len(mixer.shift)]
    keys, *others = shifted(at, "channel_mix_shift", x, mixer.shift, names, "channel shift")
    inner = at.product("channel_mix_key", keys, mixer.key, "inner")
    y = Tensor("inner", x.rows, inner.width)
    label = at.name("channel_mix_key.activation")
    inner = at.graph.add(Activate(label, y, inner, Activation("relu2")))
    if mixer.receptance is None:
        return at.finish("channel_mix_value", inner, mixer.o, scale)
    (other,) = others
    gate = at.product("channel_mix_receptance", other, mixer.receptance, "channel gate")
    made = at.finish("channel_mix_value", inner, mixer.o, scale, "ungated")
    y, f = Tensor(BRANCH, x.rows, made.width), Activation("sigmoid")
    return at.graph.add(Gate(at.name("channel_mix_receptance.activation"), y, gate, made, f))


def shifted(
    at: LayerOps,
    label: str,
    x: Tensor,
    mixes: tuple[StoredVector, ...],
    names: list[str],
    state: str,
    dynamic: tuple[Tensor, ...] = (),
    *,
    stores: bool = True,
) -> tuple[Tensor, ...]:
    """The mixes of x with the token before, by these names."""
    results = tuple(Tensor(name, x.rows, x.width) for name in names)
    of = (at.name(label), results[0], x, dynamic, mixes, results, at.index, state, stores)
    at.graph.add(Shift(*of))
    return results


def _low_ranks(at: LayerOps, mixer: TimeMix, by: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The products of low rank, by their roles."""
    places = {"decay": "w", "rate": "a", "residual": "v", "gate": "g"}
    of = {name: (getattr(mixer, name), by.get(mix)) for name, mix in places.items()}
    lows = {name: (x, low) for name, (low, x) in of.items() if isinstance(low, LowRank)}
    inputs, products = zip(*lows.values(), strict=True)
    rows = inputs[0].rows
    results = [Tensor(f"time {name}", rows, low.up.rows) for name, (_, low) in lows.items()]
    label = at.name("time_mix_low_ranks")
    at.graph.add(LowRanks(label, results[0], inputs, products, tuple(results)))
    return dict(zip(lows, results, strict=True))


def _dynamic(at: LayerOps, mixer: TimeMix, x: Tensor) -> tuple[Tensor, ...]:
    """What RWKV 6 adds to the mixes of each token."""
    of = mixer.dynamic
    if of is None:
        return ()
    (first,) = shifted(
        at, "time_mix_shift.first", x, (of.first,), ["mix first"], "shift", stores=False
    )
    label, f = "time_mix_shift.low", Activation("tanh")
    lows = []
    for number, down in enumerate(of.down):
        y = at.product(label, first, down, f"dynamic low {number}")
        z = Tensor(y.name, y.rows, y.width)
        lows.append(at.graph.add(Activate(at.name(label), z, y, f)))
    return tuple(
        at.product(f"time_mix_shift.{mix}", low, up, f"dynamic {mix}")
        for mix, low, up in zip(mixer.order, lows, of.up, strict=True)
    )


#: The operations of each mixer, as in `layers.recurrent`.
MIXERS = {TimeMix: time_mix, ChannelMix: channel_mix}
