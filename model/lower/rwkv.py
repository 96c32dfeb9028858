"""Rules for RWKV: mixes with the token before, and time mixing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from urdir.model.graph.ops import Norm, Op
from urdir.model.graph.rwkv import Shift, Wkv
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rule import Rule, variants
from urdir.model.lower.states import launch_recurrent, recurrent_state
from urdir.ptxgen.kernels.recurrent.token_shift import TokenShift
from urdir.ptxgen.kernels.recurrent.wkv import Wkv as WkvKernel


def lower_shift(at: Lowering, ops: Sequence[Op]) -> bool:
    """[norm] shift: of rows that are no prompt's the launch computes the norm."""
    *norms, of = ops
    assert isinstance(of, Shift)
    x, norm, weights = of.x, None, {}
    if norms:
        (before,) = norms
        assert isinstance(before, Norm)
        can = not at.rows.prompt and TokenShift.can_norm(of.x.width, 0)
        if not can or at.readers(before.y) != [of] or before.over:
            return False
        layer = at.norm(before.of)
        x, norm, weights = before.x, layer.norm, {"weight": layer.weight, "bias": layer.bias}

    def kernel(*, most: int, drafted: bool, **shape: Any) -> TokenShift:
        return TokenShift(
            **shape,
            channels=of.x.width,
            mixes=len(of.mixes),
            dynamic=bool(of.dynamic),
            stores=of.stores,
            norm=norm,
        )

    arguments = {
        "x": at.place(x),
        "shift": recurrent_state(at, of.layer)[of.name],
        **{f"mix{i}": at.vector(mix) for i, mix in enumerate(of.mixes)},
        **{f"dynamic{i}": at.place(mix) for i, mix in enumerate(of.dynamic)},
        **{f"y{i}": at.place(y) for i, y in enumerate(of.results)},
        **{name: vector for name, vector in weights.items() if vector is not None},
    }
    launch_recurrent(at, of.label, kernel, **arguments)
    return True


def lower_wkv(at: Lowering, ops: Sequence[Op]) -> bool:
    """Time mixing."""
    (of,) = ops
    assert isinstance(of, Wkv)
    mixer = of.mixer
    vectors = {"bonus": mixer.bonus, "key_scale": mixer.key_scale, "key_rate": mixer.key_rate}
    if mixer.norm is not None:
        vectors |= {"weight": mixer.norm.weight, "bias": mixer.norm.bias}

    def kernel(*, most: int, drafted: bool, **shape: Any) -> WkvKernel:
        return WkvKernel(
            **shape,
            heads=mixer.heads,
            dim=mixer.dim,
            kind=mixer.variant,
            key_heads=mixer.key_heads,
            residual=mixer.residual is not None,
            gate=mixer.gate is not None,
            normed=mixer.norm is not None,
            eps=0.0 if mixer.norm is None else mixer.norm.norm.eps,
        )

    arguments = {role: at.place(x) for role, x in zip(of.roles, of.inputs, strict=True)}
    arguments |= {name: at.vector(v) for name, v in vectors.items() if v is not None}
    arguments |= {"state": recurrent_state(at, of.layer)["state"], "y": at.place(of.y)}
    launch_recurrent(at, of.label, kernel, **arguments)
    return True


RULES: Sequence[Rule] = (*variants("norm? shift", lower_shift), Rule("wkv", lower_wkv))
