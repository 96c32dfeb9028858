"""New tokens of rows in numpy: prepared, and appended to the caches."""

from __future__ import annotations

import numpy as np

from urdir.ptxgen.kernels.attention.decode import DecodeAttention
from urdir.ptxgen.spec import Array


def appended(
    spec: DecodeAttention, inputs: dict[str, Array]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs after the rows' new tokens are prepared and in the caches, and these caches;
    without a token the inputs as they are, and nothing."""
    if spec.token is None:
        return inputs, {}
    if spec.is_latent:
        inputs = inputs | _joined(spec, inputs)
    names = [name[0] for name in spec.layout.caches if spec.appends]
    caches = {f"{name}_cache": inputs[f"{name}_cache"].copy() for name in names}
    q = inputs["q"].copy()
    for row in np.flatnonzero(inputs["position"] < spec.layout.max_len):
        sequence, position = (int(inputs[name][row]) for name in ("sequence", "position"))
        prepared = {
            name: spec.token.prepared(name, inputs[name][None, row], [position], inputs)[0]
            for name in ("q", *names)
        }
        q[row] = prepared["q"]
        for name in names:
            cache, layout = caches[f"{name}_cache"], spec.layout.caches[f"{name}_cache"]
            values = prepared[name][:, None]
            layout.write(cache, sequence, [position], values, inputs.get("block_table"))
    return inputs | {"q": q} | caches, caches


def _joined(spec: DecodeAttention, inputs: dict[str, Array]) -> dict[str, Array]:
    """q and k of their parts, in float64."""
    assert spec.token is not None
    assert spec.token.latent_norm is not None
    q = np.concatenate([inputs["q_rotated"], inputs["q_absorbed"]], axis=2)
    if not spec.appends:
        return {"q": q}
    value = spec.token.latent_norm(inputs["latent"], inputs["latent_norm"])
    k = np.concatenate([inputs["k_rotated"], value], axis=1)
    return {"q": q, "k": k[:, None]}
