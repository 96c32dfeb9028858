"""Exact arithmetic and the type of the cache are two settings: any combination works."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.model_kernels import model_kernels
from urdir.model.verify.conformance import Logits, relative_rms
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.spec import KernelSpec

CACHES: tuple[KvDtype, ...] = ("f32", "f16", "bf16", "q8_0", "fp8")
TOKENS = [3, 141, 59, 26, 5]
#: Kernels that round activations whatever their settings.
ROUNDING = {"gemm_small", "gemm", "gemm_wgmma", "pack", "prefill_attention", "prefill_wgmma"}


def specs(kv_dtype: KvDtype, exact: bool, context: int) -> list[KernelSpec]:
    """Every kernel of a large model's steps."""
    model = SyntheticModel("llama-3.1-8b", "q4_k_m")
    config = Config.of(model)
    found = model_kernels(model, config, context, "sm_90a", 132, kv_dtype, exact)
    return [kernel.spec for kernel in found]


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", CACHES)
def test_exact_steps_round_no_activations(kv_dtype: KvDtype) -> None:
    """With a long context too, where prompts take split attention."""
    found = specs(kv_dtype, True, 8192)
    names = {spec.name for spec in found}
    assert names >= {"gemv_f32", "flash_decode", "incremental_attention"}
    assert not names & ROUNDING
    assert {spec.activations for spec in found if isinstance(spec, Gemv)} == {"f32"}


@pytest.mark.turns(2)
@pytest.mark.parametrize("kv_dtype", CACHES)
def test_the_cache_alone_does_not_make_steps_exact(kv_dtype: KvDtype) -> None:
    found = specs(kv_dtype, False, 512)
    names = {spec.name for spec in found}
    assert "gemm_wgmma" in names
    assert names & {"prefill_attention", "prefill_wgmma"}
    assert {spec.activations for spec in found if isinstance(spec, Gemv)} == {"i16"}


@pytest.mark.slow
def test_each_setting_has_its_own_error(data: Path, device_name: str) -> None:
    """Rounded activations and a rounded cache differ from neither, each in its own way."""
    found: dict[tuple[KvDtype, bool], Logits] = {}
    for kv_dtype in ("f32", "q8_0"):
        for exact in (True, False):
            with (
                Engine.open(
                    str(data / "golden" / "nano-llama-q8_0.gguf"),
                    device=device_name,
                    context=16,
                    kv_dtype=kv_dtype,
                    exact=exact,
                ) as engine,
                EagerSteps(engine.session) as eager,
            ):
                eager.feed(TOKENS)
                assert engine.session.parts.cache.layout(0).dtype == kv_dtype
                found[kv_dtype, exact] = eager.logits()[0]
    neither = found.pop(("f32", True))
    errors = {key: relative_rms(logits, neither) for key, logits in found.items()}
    assert all(0 < error < 2e-2 for error in errors.values())
    assert errors["f32", False] < errors["q8_0", True]
    assert not np.array_equal(found["q8_0", True], found["q8_0", False])
