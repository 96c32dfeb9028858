"""Examples of `GemmSmall`, which ``cls`` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.spec import odd_cols
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS

S = TypeVar("S")


def gemm_small_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Each type, and each way to cut, to begin and to end a product."""
    rms, fine = Norm("rms", 1e-5), Norm("rms", 1e-6)
    quantised = [f for f in FORMATS.values() if not f.is_float]
    q8, q4_k, q6_k, q5_0 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "Q5_0"))
    each = {
        f.name: cls(f, 16 + 9 * i, odd_cols(f), bias=i % 2 == 0, batch=1 + i % 8)
        for i, f in enumerate(quantised)
    }
    wide = {
        f"{f.name} wide": cls(
            f, 33, 1024, batch=8 - i % 8, residual=i % 2 == 0, tiles_each=1 + i % 3
        )
        for i, f in enumerate(quantised)
    }
    packed = {
        f"{f.name} packed": cls(f, 25 + 9 * i, odd_cols(f), batch=1 + (i + 3) % 8, packed=True)
        for i, f in enumerate(quantised)
    }
    return {
        "smallest": cls(q8, 3, 32, batch=2),
        **each,
        **wide,
        **packed,
        "packed residual": cls(
            q4_k, 85, 2304, residual=True, batch=7, split=2, packed=True, bias=True
        ),
        "packed cluster": cls(
            q6_k, 80, 4352, residual=True, cluster=2, summarises=True, tiles_each=2, packed=True
        ),
        "packed in passes": cls(
            q8, 80, 1600, split=2, groups=1, tiles_each=4, per_pass=2, packed=True, batch=5
        ),
        "packed shared blocks": cls(
            q4_k, 64, 1536, residual=True, split=4, groups=1, tiles_each=4, packed=True
        ),
        "packed gated norm": cls(
            q4_k,
            256,
            1024,
            gated=True,
            norm=rms,
            summarised=True,
            packed=True,
            packs="units",
            batch=5,
            split=2,
            groups=1,
            tiles_each=3,
        ),
        "packed norm, three matrices": cls(
            q4_k,
            40,
            1536,
            norm=rms,
            summarised=True,
            packed=True,
            others=((q6_k, 17), (q8, 5)),
            batch=7,
            cluster=2,
            bias=True,
        ),
        "packed norm in passes": cls(
            q4_k,
            80,
            1024,
            norm=fine,
            summarised=True,
            packed=True,
            split=2,
            groups=1,
            tiles_each=5,
            per_pass=3,
            batch=6,
        ),
        "packs norm": cls(
            q4_k,
            256,
            768,
            residual=True,
            summarises=True,
            packed=True,
            packs="units",
            cluster=2,
            batch=7,
        ),
        "packs": cls(q4_k, 256, 512, gated=True, norm=rms, summarised=True, packs="lanes", batch=5),
        "packs few": cls(q5_0, 256, 96, batch=3, packs="units", activation=Activation("relu2")),
        "packs packed": cls(q8, 512, 288, cluster=1, packed=True, packs="lanes", batch=6),
        "norm in passes": cls(
            q4_k, 40, 2304, norm=rms, split=2, tiles_each=3, per_pass=2, bias=True
        ),
        "gated norm": cls(q4_k, 40, 768, gated=True, norm=rms, batch=4),
        "gated split Q6_K": cls(q6_k, 23, 1536, gated=True, batch=3, split=2, groups=1, stages=2),
        "gated Q5_0": cls(q5_0, 17, 1376, gated=True, norm=fine, batch=7, stages=3, tiles_each=2),
        "norm, three matrices": cls(
            q4_k, 64, 1024, norm=rms, others=((q6_k, 17), (q8, 5)), batch=5, tiles_each=2
        ),
        "residual long rows": cls(q4_k, 9, 4864, residual=True, batch=8, stages=4),
        "norm Q6_K": cls(q6_k, 20, 1280, norm=fine, batch=3, split=1, groups=2),
        "split Q5_0": cls(q5_0, 40, 1376, batch=5, split=2, groups=1, tiles_each=2),
        "cluster residual": cls(q4_k, 40, 2304, residual=True, batch=8, cluster=2),
        "cluster of 4 norm in passes": cls(
            q4_k, 40, 4352, bias=True, norm=rms, batch=5, cluster=4, tiles_each=4, per_pass=2
        ),
        "cluster gated norm": cls(
            q6_k, 50, 1280, gated=True, norm=fine, batch=3, cluster=2, split=1, groups=2
        ),
        "cluster norm, two matrices": cls(
            q4_k, 35, 768, norm=rms, others=((q8, 17),), batch=2, cluster=2
        ),
        "gated norm in passes": cls(
            q4_k, 70, 1280, gated=True, norm=rms, split=2, groups=1, tiles_each=5, per_pass=3
        ),
        "residual split Q6_K": cls(
            q6_k, 70, 1280, residual=True, batch=4, split=2, groups=1, tiles_each=5
        ),
        "norm in passes Q8_0": cls(q8, 70, 480, norm=rms, batch=6, tiles_each=5, per_pass=2),
        "summarises": cls(q8, 48, 288, residual=True, batch=5, summarises=True),
        "summarised gated": cls(q4_k, 48, 1280, gated=True, norm=rms, summarised=True, batch=7),
        "cluster summarises": cls(
            q6_k, 80, 1280, residual=True, batch=3, cluster=2, summarises=True, tiles_each=2
        ),
        "cluster summarised": cls(
            q4_k, 40, 768, norm=rms, others=((q8, 17),), batch=4, cluster=2, summarised=True
        ),
        "summarised Q5_0": cls(
            q5_0, 48, 1376, norm=fine, batch=2, split=2, groups=1, summarised=True
        ),
        "summarises in passes": cls(
            q4_k, 80, 2304, residual=True, split=2, tiles_each=5, per_pass=3, summarises=True
        ),
        "split in 4": cls(q4_k, 50, 1536, residual=True, batch=4, split=4, groups=1, tiles_each=4),
        "split in 4 Q6_K": cls(q6_k, 80, 2560, batch=7, split=4, groups=2, tiles_each=4, stages=3),
        "cluster split in 4": cls(
            q8, 80, 2464, bias=True, batch=2, split=4, groups=1, tiles_each=4, cluster=2
        ),
        "norm without weight": cls(
            q4_k,
            40,
            768,
            norm=Norm("rms", 1e-6, weight=False),
            batch=3,
            softcap=160.0,
            scale=0.25,
        ),
        "gated with biases": cls(
            q8, 40, 512, gated=True, bias=True, batch=6, activation=Activation("gelu")
        ),
        "residual, bias, scale": cls(
            q8, 40, 288, bias=True, residual=True, scale=0.22, batch=5, cluster=1
        ),
        "summarises with bias": cls(
            q8, 48, 288, bias=True, residual=True, batch=4, summarises=True
        ),
        "some biases": cls(
            q4_k, 35, 512, bias=(False, True), others=((q8, 17),), batch=5, clamp=300.0
        ),
        "activation": cls(q5_0, 20, 96, batch=2, bias=True, activation=Activation("relu2")),
        "balanced matrices": cls(
            q4_k, 160, 1024, norm=rms, others=((q6_k, 32), (q8, 50)), batch=3, sms=9
        ),
    }
