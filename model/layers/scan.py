"""Mamba's mixer as operations: the products of what was convolved, and the scan, whose channels
decay each by itself or by heads."""

from __future__ import annotations

from urdir.model.families.recurrent import Selective
from urdir.model.families.stored import Linear
from urdir.model.graph.ops import Norm
from urdir.model.graph.recurrent import Scan
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.builder import LayerOps
from urdir.model.layers.recurrent import GATE, convolve, gated_by_silu, recur


def selective(at: LayerOps, mixer: Selective, x: Tensor, scale: float) -> Tensor:
    """scale * o (scan(...) * silu(gate x)); see `Selective`."""
    mixed = at.product("ssm_in", x, mixer.mixed, "mixed")
    gate = at.product("ssm_in", x, mixer.gate, GATE)
    u = convolve(at, "ssm_conv1d", mixed, mixer.conv, "convolved")
    parts = [
        ("low", mixer.low, mixer.low_norm),
        ("scan b", mixer.b, mixer.b_norm),
        ("scan c", mixer.c, mixer.c_norm),
    ]
    made = {name: at.product("ssm_x", u, of, name) for name, of, _ in parts}
    for name, of, norm in parts:
        if of.matrix.columns is not None:
            made[name] = at.add_ranks(f"ssm_{name}", made[name], name)
        if norm is not None:
            y = Tensor(name, x.rows, of.rows)
            made[name] = at.graph.add(Norm(at.name(f"ssm_{name}_norm"), y, made[name], norm))
    heads = Tensor("heads", x.rows, mixer.conv.channels)
    b, c = made["scan b"], made["scan c"]
    if not mixer.heads:
        step = at.product("ssm_dt", made["low"], mixer.step, "alpha")
        label = at.name("ssm_scan")
        y = at.graph.add(Scan(label, heads, step, u, gate, b, c, mixer, at.index))
        return at.finish("ssm_out", y, mixer.o, scale)
    # the kernel adds the bias
    step = at.product("ssm_dt", made["low"], Linear(mixer.step.matrix), "alpha")
    inputs = {"q_heads": c, "k_heads": b, "v_heads": u, "alpha": step}
    y = gated_by_silu(at, recur(at, "ssm_scan", mixer, inputs, heads), gate)
    return at.finish("ssm_out", y, mixer.o, scale)
