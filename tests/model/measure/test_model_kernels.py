"""Which kernels a model uses, found without a device: against what a session really loads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.model.stepping import set_sampling
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.driver.ptx_files import PtxFiles
from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.realizar import EagerSteps, describe
from urdir.model.engine.runner import Steps
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import StoredVector, stored_in
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.files.gguf import Gguf
from urdir.model.files.opened import Tensor
from urdir.model.measure.model_kernels import folded, model_kernels, step_shapes
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.buckets import chunks_of
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.rotation import RopeScaling
from urdir.ptxgen.render.kernel import field_values

CONTEXT = 64


@pytest.fixture
def nano(data: Path) -> Path:
    return data / "golden" / "nano-llama-q8_0.gguf"


def _shape_8b(layers: int = 32, head_dim: int = 128) -> tuple[Any, Config]:
    """A model of the size of Llama 3 8B that has tensors' types and shapes, and no data."""
    config = describe(
        layers=layers,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=head_dim,
        ffn=14336,
        vocab=128256,
        context=131072,
        rope=RopeConfig(128, "interleaved", 10000.0, RopeScaling.none()),
    )
    stored = {}
    for spec in stored_in(config):
        role = spec.name.removesuffix(".weight").rpartition(".")[2]
        six_bits = role in ("ffn_down", "attn_v", "output")
        kind = GGMLQuantizationType.Q6_K if six_bits else GGMLQuantizationType.Q4_K
        if isinstance(spec, StoredVector):
            kind = GGMLQuantizationType.F32
        block, nbytes = GGML_QUANT_SIZES[kind]
        size = int(np.prod(spec.shape)) // block * nbytes
        data = np.empty(0, np.uint8)
        stored[spec.name] = Tensor(spec.name, int(kind), spec.shape, 0, size, data)
    return SimpleNamespace(tensors=stored), config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "exact"), [("f16", False), pytest.param("q8_0", True, marks=pytest.mark.full)]
)
def test_it_finds_what_a_session_loads(
    nano: Path, tmp_path: Path, kv_dtype: KvDtype, exact: bool
) -> None:
    files = PtxFiles(dump=tmp_path)
    with Gguf(nano) as gguf, Device.open("emulator", ptx_files=files) as device:
        config = Config.of(gguf)
        sm_count = device.properties.sm_count
        found = model_kernels(gguf, config, CONTEXT, "sm_90a", sm_count, kv_dtype, exact)
        with (
            Weights.load(gguf, config, device) as weights,
            Session(device, weights, SessionSettings(CONTEXT, kv_dtype, exact=exact)) as session,
            EagerSteps(session) as eager,
        ):
            for end in (6, 13, 20, 49):  # each size of prompt step
                eager.truncate(0)
                eager.feed([1] * end)
                eager.step()
            eager.truncate(0)
            eager.feed([1] * 49)
            eager.process(48)  # a prompt step without an output
            eager.step()
            set_sampling(eager, SamplingSettings(seed=1))
            eager.step(output=Output.LOGPROBS)
            eager.logits()
    loaded = {path.stem for path in tmp_path.iterdir()}
    listed = {kernel.spec.key("sm_90a") for kernel in found}
    assert {key for key in loaded if not key.startswith(("repack-", "row_powers-"))} <= listed
    assert not [kernel.spec for kernel in found if kernel.spec.key("sm_90a") not in loaded]


def test_counts_are_those_of_the_plans(nano: Path) -> None:
    with Gguf(nano) as gguf, Device.open("emulator") as device:
        config = Config.of(gguf)
        found = model_kernels(gguf, config, CONTEXT, "sm_90a", device.properties.sm_count)
        with (
            Weights(gguf, config, device) as weights,
            Session(device, weights, SessionSettings(CONTEXT)) as session,
        ):
            for shape in (
                StepShape(1, session.parts.cache.shape.max_len, Output.GREEDY),
                StepShape(64, session.parts.cache.shape.max_len, Output.GREEDY, prompt=64),
            ):
                plan = Steps(session.parts, 1 << 30).bound(shape).plan
                expected = Counter(op.kernel for op in plan if isinstance(op, Launch))
                assert {k.spec: k.launches[shape] for k in found if shape in k.launches} == expected


@pytest.mark.slow
def test_a_large_model_needs_its_metadata_only() -> None:
    gguf, config = _shape_8b()
    found = model_kernels(gguf, config, 4096, "sm_90a", 132)
    by_name = Counter(kernel.spec.name for kernel in found)
    assert by_name["flash_decode"] >= 1
    steps = step_shapes(ShapeBuckets.of(chunks_of(exact=False), 4096))
    assert {s.keys for s in steps} == {256, 512, 4096}
    for kernel in found:
        for shape, count in kernel.launches.items():
            if not shape.prompt:
                assert count % 32 in (0, 1) or kernel.spec.name == "normalise", (kernel.spec, shape)
        assert set(kernel.launches) | set(kernel.missing) == set(steps)
        assert not set(kernel.launches) & set(kernel.missing)
    shortest = next(s for s in steps if s.rows == 1 and s.keys == 512)
    weights = sum(
        kernel.spec.nbytes(param) * kernel.launches.get(shortest, 0)
        for kernel in found
        if kernel.spec.name == "gemv"
        for param in kernel.spec.params
        if param.name.startswith(("weights", "up"))
    )
    stored = sum(t.nbytes for n, t in gguf.tensors.items() if len(t.shape) == 2)
    embedding = gguf.tensors["token_embd.weight"].nbytes
    assert weights == pytest.approx(stored - embedding, rel=0.02)  # repacking pads a little


@pytest.mark.parametrize(("target", "sms"), [("sm_75", 40), ("sm_80", 108), ("sm_89", 58)])
def test_rows_too_long_for_an_sm_take_f32_products(target: str, sms: int) -> None:
    """Of an 8B model the 14336 columns of ffn_down, where an SM has 64 KB."""
    gguf, config = _shape_8b(layers=1)
    found = model_kernels(gguf, config, 4096, target, sms)
    decode = [kernel.spec for kernel in found if kernel.per_step(prompt=False)]
    columns = {
        name: {field_values(spec)["cols"] for spec in decode if spec.name == name}
        for name in ("gemv", "gemv_f32")
    }
    if target == "sm_75":
        assert columns == {"gemv": {4096}, "gemv_f32": {14336}}
    else:
        assert columns == {"gemv": {4096, 14336}, "gemv_f32": set()}


def test_it_says_which_steps_use_a_kernel() -> None:
    gguf, config = _shape_8b(layers=1)
    found = model_kernels(gguf, config, 4096, "sm_90a", 132)
    used = {kernel.spec.name: kernel.used_in() for kernel in found if "argm" in kernel.spec.name}
    assert used == {"argmax": "decode (greedy), prompt"}
    attention = {k.used_in() for k in found if "attention" in k.spec.name and not k.per_step(True)}
    assert attention == {"decode (256 keys)"}
    chunks = {k.used_in() for k in found if k.spec.name == "flash_decode"}
    assert chunks == {"decode (512 keys)", "decode (4096 keys)"}  # clusters of four and eight
    assert "prompt (64 rows)" in {k.used_in() for k in found}
    assert "decode" in {k.used_in() for k in found}


def test_prompts_of_several_sizes_are_folded_by_what_they_do(nano: Path) -> None:
    with Gguf(nano) as gguf:
        found = model_kernels(gguf, Config.of(gguf), 512, "sm_90a", 132)
    kept = folded(found)
    assert len(kept) < len(found) / 2
    assert sum(len(kernel.alike) for kernel in kept) == len(found) - len(kept)
    assert {k.spec for k in kept} | {spec for k in kept for spec in k.alike} == {
        k.spec for k in found
    }
    shapes = {shape for kernel in found for shape in kernel.launches}
    for shape in shapes:
        assert [sum(k.launches.get(shape, 0) for k in each) for each in (kept,)] == [
            sum(k.launches.get(shape, 0) for k in found)
        ]
    for kernel in kept:
        assert set(kernel.launches) | set(kernel.missing) == shapes
        assert not set(kernel.launches) & set(kernel.missing)
        assert {spec.name for spec in kernel.alike} <= {kernel.spec.name}
        if kernel.alike:
            assert not kernel.per_step(prompt=False)
    largest = max((s for s in shapes if s.prompt), key=lambda s: (s.rows, s.keys))
    of_largest = [k.spec for k in found if largest in k.launches]
    assert [k.spec for k in kept if largest in k.launches] == of_largest
    assert "prompt (16 to 512 rows)" in {kernel.used_in() for kernel in kept}


def test_targets_and_shapes_that_cannot_be() -> None:
    gguf, config = _shape_8b(layers=1)
    with pytest.raises(ModelError, match="sm_42"):
        model_kernels(gguf, config, 4096, "sm_42", 132)
    with pytest.raises(ModelError, match="context"):
        model_kernels(gguf, config, 1 << 20, "sm_90a", 132)
    gguf, wide = _shape_8b(layers=1, head_dim=2048)
    with pytest.raises((ModelError, PtxgenError), match="head_dim"):
        model_kernels(gguf, wide, 4096, "sm_90a", 132)


@pytest.mark.slow
def test_walks_of_as_many_rows_have_the_same_kernels() -> None:
    """Whatever their lengths: these are parameters, and decide the grids."""
    model = SyntheticModel("deepseek-v2-lite")
    config = Config.of(model)
    with paper_device("sm_90a", 132) as device:
        weights = Weights(model, config, device)
        with Session(device, weights, SessionSettings(8192)) as session:
            shapes = [session.shapes.prompt(end - 500, end)[0] for end in (500, 2000, 8000)]
            assert len({shape.walk.length for shape in shapes}) == 3
            plans = [build_plan(session.parts, shape) for shape in shapes]
    found = [{op.kernel.key("sm_90a") for op in plan if isinstance(op, Launch)} for plan in plans]
    assert found[0] == found[1] == found[2]
