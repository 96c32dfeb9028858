"""Adapters as operations: their evaluation against merged weights, and how they are grouped."""

from __future__ import annotations

import lzma
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.errors import SettingsError, UnsupportedError
from urdir.model.families.adapters import AdapterRoom
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.files.low_rank import Adapter, LowRank
from urdir.model.graph.adapters import Adapt, with_adapters
from urdir.model.graph.evaluation import Evaluation
from urdir.model.layers.adaptable import adaptable, room_for
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers

FAMILIES = Path(__file__).parents[2] / "data" / "families"
TOKENS = [3, 1, 4, 1]


def graph_of(config: Config) -> Any:
    step = StepOps(config, len(TOKENS))
    x = layers(step, embedding(step))
    assert x is not None
    return step.graph, head(step, x)


@pytest.mark.parametrize("name", ["llama-dense", "llama-moe"])
def test_logits_with_an_adapter(name: str, tmp_path: Path, reference_model: Any) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((FAMILIES / f"{name}.gguf.xz").read_bytes()))
    random, merged, adapters = np.random.default_rng(1), {}, {}
    with Gguf(path) as file:
        config = Config.of(file).at_context(64)
        reference = reference_model(file, config, 64)
        takes = adaptable(config)
        for tensor in takes:
            values = reference.tensor(tensor)
            *experts, rows, cols = values.shape
            a = random.standard_normal((*experts, 3, cols)) / cols**0.5
            b = random.standard_normal((*experts, rows, 3))
            merged[tensor], adapters[tensor] = values + b @ a, (a, b)
        room = AdapterRoom(2, 8, frozenset(takes))
        graph, logits = graph_of(config)
        adapted = with_adapters(graph, room)
        found = adapted.evaluate(Evaluation(reference, TOKENS, adapters=adapters))[logits]
        plain = adapted.evaluate(Evaluation(reference, TOKENS))[logits]
        np.testing.assert_allclose(plain, reference.logits(TOKENS), atol=1e-9)
        before = reference.tensor
        reference.tensor = lambda name: merged[name] if name in merged else before(name)
        np.testing.assert_allclose(found, reference.logits(TOKENS), atol=1e-9)


def test_products_of_one_tensor_share_an_operation(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((FAMILIES / "llama-dense.gguf.xz").read_bytes()))
    with Gguf(path) as file:
        config = Config.of(file)
        names = frozenset(name for name in adaptable(config) if "attn_k" not in name)
        graph, _ = graph_of(config)
        assert with_adapters(graph, None) is graph
        adapted = with_adapters(graph, AdapterRoom(1, 8, names))
    of_layer = [op for op in adapted if isinstance(op, Adapt) and op.label.startswith("blk.1.")]
    shared = [[of.matrix.name.split(".")[2] for of in op.of] for op in of_layer]
    assert shared == [["attn_q", "attn_v"], ["attn_output"], ["ffn_gate", "ffn_up"], ["ffn_down"]]
    assert len(adapted.starts) == len(graph.starts)
    starts = [adapted.ops[start].label for start in adapted.starts]
    assert starts == [graph.ops[start].label for start in graph.starts]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("rwkv6-dense", "blk.1.time_mix_w2.weight"),
        ("rwkv7-dense", "blk.1.time_mix_w1.weight"),
        ("gemma3n-dense", "altup_proj.weight"),
        ("gemma3n-dense", "altup_unembd_proj.weight"),
    ],
)
def test_adapters_that_have_no_place_are_refused(model: str, name: str, tmp_path: Path) -> None:
    """Of matrices that lie in one tensor, and of products of low rank."""
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((FAMILIES / f"{model}.gguf.xz").read_bytes()))
    with Gguf(path) as file:
        config, shape = Config.of(file), file.tensors[name].shape
    experts = shape[0] if len(shape) == 3 else 1
    a = np.zeros((experts, 2, shape[-1]), np.float32)
    b = np.zeros((experts, shape[-2], 2), np.float32)
    adapter = Adapter(Path("some"), config.architecture, {name: LowRank(a, b)})
    refused = re.escape(f"'{name}': adapters of it are not supported")
    with pytest.raises(UnsupportedError, match=refused):
        room_for(config, [(adapter, 1.0)], "f16")


def test_room_for_adapters_that_are_applied_together(tmp_path: Path) -> None:
    """Of the tensor with the most ranks; one without a scale is alone where a request names it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((FAMILIES / "llama-dense.gguf.xz").read_bytes()))
    with Gguf(path) as file:
        config, tensors = Config.of(file), file.tensors

    def adapter(**ranks: int) -> Adapter:
        matrices = {}
        for name, rank in ranks.items():
            rows, cols = tensors[f"blk.0.{name}.weight"].shape
            a, b = np.zeros((1, rank, cols), np.float32), np.zeros((1, rows, rank), np.float32)
            matrices[f"blk.0.{name}.weight"] = LowRank(a, b)
        return Adapter(Path("some"), config.architecture, matrices)

    first, second = adapter(attn_q=16, attn_v=8), adapter(attn_v=16, ffn_up=16)
    for scales, rank in (((1.0, -0.5), 24), ((0.0, 0.0), 16), ((0.0, 1.0), 16)):
        given = [*zip((first, second), scales, strict=True)]
        assert room_for(config, given, "f16").rank == rank, scales
    together = [(adapter(attn_q=16), 1.0)] * 3
    assert room_for(config, together, "f16").rank == 48
    assert room_for(config, [(of, 0.0) for of, _ in together], "f16").rank == 16
    assert room_for(config, together, "f16", rank=16).rank == 16
    with pytest.raises(SettingsError, match="rank 1,040 together, at most 1,024"):
        room_for(config, together[:1] * 65, "f16")
