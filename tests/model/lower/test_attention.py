"""Attention as a layer launches it: decode rows in one go, against turned, appended, attended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.memory import Slice
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.graph.attention import Attend
from urdir.model.graph.ops import Rope
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.attention import attention
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.lower.attend import LayerAttention, incremental_attention_into
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.prepared import Prepared, layer_attention
from urdir.model.lower.rows import Rows
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.attention.kv_types import KvDtype

#: Where the rows of a step stand, each in a sequence of its own; 2048 is an idle one.
POSITIONS = (0, 3, 2048, 140)
UNFUSED, SPLIT = ["prepare_tokens"], ["flash_decode"]


@pytest.fixture(scope="module")
def device(device_name: str) -> Iterator[Device]:
    with Device.open(device_name) as opened:
        yield opened


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def weights(
    request: pytest.FixtureRequest, device: Device, reference_file: Callable[[str], Path]
) -> Iterator[Weights]:
    """Pairs of neighbours turn in one, of halves in the other."""
    with Gguf(reference_file(f"nano-{request.param}-q4_k_m")) as gguf:
        config = replace(Config.of(gguf), context_length=2048)
        with Weights.load(gguf, config, device) as loaded:
            yield loaded


def fill(session: Session) -> LayerAttention:
    """Layer 1's attention of a decode step: random queries, keys and values, new and old."""
    rng = np.random.default_rng(8)
    cache, work, state = session.parts.cache, session.parts.work, session.parts.state
    mixer = session.parts.config.layers[1].attention
    assert mixer is not None
    widths = {
        "q": mixer.query_width,
        "k": mixer.kv_heads * mixer.key_dim,
        "v": mixer.kv_heads * mixer.value_dim,
    }
    offset = 0
    for name, width in (*widths.items(), ("heads", mixer.output_width)):
        assert work.shared is not None
        work.kept[name] = work.shared.slice(offset, 4 * 4 * width, name)
        offset += 4096 * -(-width // 256)
    for name in "qkv":
        work[name].upload(rng.standard_normal(work[name].nbytes // 4).astype(np.float32))
    for sequence, position in enumerate(POSITIONS):
        if position < cache.shape.max_len:
            cache.reserve(sequence, 0, position + 1)
    for memory in stored(session):
        memory.upload(rng.integers(0, 60, memory.nbytes, np.uint8))  # no NaN, no infinity
    state["sequence"].upload(np.arange(4, dtype=np.uint32))
    state["position"].upload(np.array(POSITIONS, np.uint32))
    rows, heads = Rows.of(state, 4, 512), Tensor("heads", 4, mixer.output_width)
    step = StepOps(session.parts.config, 4)
    x = step.graph.input(step.stream())
    attention(LayerOps(step, 1), mixer, x, 1.0)
    ops = [op for op in step.graph if isinstance(op, Rope | Attend)]
    at = Lowering(Sheet(work), session.parts, rows, step.graph)
    prepared = Prepared.of(ops)
    assert prepared is not None
    assert prepared.token is not None
    assert heads.width == prepared.attend.y.width
    return layer_attention(at, prepared.attend, prepared.token, prepared.constants(at))


def stored(session: Session) -> list[Slice]:
    """Keys and values of layer 1."""
    caches = session.parts.cache.arguments(1)
    return [caches["k_cache"], caches["v_cache"]]


def attend(session: Session, at: LayerAttention) -> tuple[list[str], list[Any]]:
    """Names of the kernels; bytes of the output and of the cache."""
    plan, work = Plan("attention"), session.parts.work
    incremental_attention_into(plan, at, work["heads"])
    device = session.parts.device
    with execute.record(plan, device) as graph, device.create_stream() as stream:
        graph.launch(stream)
        stream.synchronize()
    rows = work["heads"].download(np.uint8)[: 4 * at.rows.count * at.heads * at.layout.head_dim]
    kernels = [op.kernel.name for op in plan if isinstance(op, Launch)]
    return kernels, [rows, *(memory.download(np.uint8) for memory in stored(session))]


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    ("kv_dtype", "page_len"),
    [("f16", 0), ("f16", 16), ("f32", 0), ("q8_0", 32), ("fp8", 16), ("q4_0", 0)],
)
@pytest.mark.parametrize("keys", [512, 2048])
def test_a_decode_step_equals_turn_append_attend(
    device: Device, weights: Weights, kv_dtype: KvDtype, page_len: int, keys: int
) -> None:
    """Bit for bit: the rows of an exact prompt, whose tokens are appended before."""
    with Session(
        device, weights, SessionSettings(2048, kv_dtype, sequences=4, page_len=page_len)
    ) as session:
        at = fill(session)
        fused = replace(at, rows=replace(at.rows, keys=keys))
        kernels, wanted = attend(session, fused)
        assert kernels == (["incremental_attention"] if keys == 512 else SPLIT)
        prompt = replace(fused, rows=replace(fused.rows, prompt=fused.rows.count), exact=True)
        fill(session)
        others, found = attend(session, prompt)
        assert others == UNFUSED + kernels
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(one, other)
