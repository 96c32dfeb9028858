"""How far decode attention may be off, by what it computes with."""

from __future__ import annotations

from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.spec import Tolerance


def decode_tolerance(
    layout: KvLayout, scores: Scores, token: OwnToken | None, on_tensor_cores: bool
) -> Tolerance:
    """Allowed deviation of f32 outputs, relative to the largest.

    The inputs are the cache's own values: the rest is f32 arithmetic and ex2.approx (2^-22
    relative). On tensor cores queries and weights are the sum of two f16 (2^-22) or two bf16
    (2^-16); weights times scales of quants are rounded to f16, queries of quants to 2^-16 of the
    largest of 32 dims. Of weights times scales of heads low parts may be subnormal: an error of
    2^-25, of weights from 2^4 on times scales. A soft-cap adds the error of tanh (4e-7) times the
    cap. A rope adds the error of sines (2^-20.5) in every term of a score; a norm or a temperature
    that of its factor (2^-22), ALiBi that of its slope, times the distance of keys that still
    matter.
    """
    rope = token.rope if token else None
    turned = 3e-5 * max(1.0, rope.magnitude) ** 2 if rope else 0.0
    factor = 1e-5 if token and (token.qk_norm or token.temperature) else 0.0
    slope = 1e-5 if scores.max_bias else 0.0
    errors = {"bf16": 4 * 2.0**-16, "s8": 2.0**-11}
    parts = max(errors.get(of.operand, 0.0) for of in layout.formats)
    products = parts if on_tensor_cores else 0.0
    return Tolerance(rtol=5e-6 + 4e-7 * scores.softcap + turned + factor + slope + products)
