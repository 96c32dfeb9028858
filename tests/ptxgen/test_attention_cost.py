"""Registers and shared memory of attention where heads are wide and all fields are on."""

from __future__ import annotations

from typing import Any

import pytest

from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, V_NORM, OwnToken, Temperature
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.rotation import Rotation
from urdir.ptxgen.tools.assemble import assemble, is_available

ALL = Scores(softcap=30.0, window=4096, chunk=8192, sinks=True, max_bias=8.0)
TOKEN = OwnToken(Rotation(64, "half", 1.2), QK_NORM, V_NORM, Temperature(0.1, 8192, 1))

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed"),
    pytest.mark.parametrize("target", ["sm_75", "sm_90"]),
    pytest.mark.parametrize("dtype", ["f16", "q8_0"]),
    pytest.mark.parametrize("dims", [(512, 512), (192, 128)]),
]


def layout(dims: tuple[int, int], dtype: Any) -> KvLayout:
    head_dim, value_dim = dims
    return KvLayout(
        8, 2, 1 << 17, head_dim, dtype, 16, 1 << 14, value_dim=value_dim, capacity=1 << 14
    )


@pytest.mark.turns(3)
def test_decoding(target: str, dtype: Any, dims: tuple[int, int]) -> None:
    """No spills; from sm_90 on two CTAs an SM, but of the sums of 512 values on tensor cores."""
    spec = IncrementalAttention(14, layout(dims, dtype), 8, ALL, TOKEN)
    cost = assemble(spec.ptx(target), target).entries[spec.name]
    assert not cost.spills
    assert cost.shared <= 48 * 1024
    is_alone = target == "sm_75" or (dims == (512, 512) and dtype == "f16")
    assert cost.registers <= (255 if is_alone else 128)


@pytest.mark.turns(3)
def test_prompts(target: str, dtype: Any, dims: tuple[int, int]) -> None:
    """No spills, and no more shared memory than a CTA has on sm_75: 64 KB."""
    spec = PrefillAttention(14, layout(dims, dtype), 512, ALL)
    cost = assemble(spec.ptx(target), target).entries[spec.name]
    assert not cost.spills
    assert cost.shared + spec.launch_shape.shared_bytes <= 64 * 1024
