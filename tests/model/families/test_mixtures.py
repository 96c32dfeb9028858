"""Mixtures of experts that no golden has: groups, odd widths, further layers, and files whose
numbers cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.model.families.described import kinds, read, second
from urdir.model.errors import ConfigError, ModelError, UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.stored import StoredMatrix
from urdir.ptxgen.kernels.activation import Activation

HIDDEN = 128  # of most goldens

Changed = Callable[..., Any]
Logits = Callable[[Any], np.ndarray[Any, Any]]


def mixture_of(config: Config, layer: int) -> Mixture:
    found = second(config, layer)
    assert isinstance(found, Mixture)
    return found


def attention_of(config: Config, layer: int) -> Attention:
    found = config.layers[layer].attention
    assert found is not None
    return found


def random(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed + sum(shape)).normal(0.0, 0.1, shape).astype(np.float32)


@pytest.fixture
def logits(reference_model: Any) -> Logits:
    return lambda model: reference_model(model, read(model)).logits([3, 1, 4, 1, 5])


# ---- routers ----


def with_experts(
    changed: Changed, experts: int, keys: Mapping[str, Any], name: str = "dots1-moe"
) -> Any:
    """dots1 with so many small experts in its second layer."""
    width = 24
    shapes = {
        "ffn_gate_inp.weight": (experts, HIDDEN),
        "exp_probs_b.bias": (experts,),
        "ffn_gate_exps.weight": (experts, width, HIDDEN),
        "ffn_up_exps.weight": (experts, width, HIDDEN),
        "ffn_down_exps.weight": (experts, HIDDEN, width),
        "ffn_gate_shexp.weight": (width, HIDDEN),
        "ffn_up_shexp.weight": (width, HIDDEN),
        "ffn_down_shexp.weight": (HIDDEN, width),
    }
    own = {"expert_count": experts, "expert_feed_forward_length": width, **keys}
    return changed(name, own, {f"blk.1.{n}": random(*s) for n, s in shapes.items()})


def test_groups_of_experts(changed: Changed, reference_model: Any) -> None:
    keys = {
        "expert_used_count": 3,
        "expert_group_count": 5,
        "expert_group_used_count": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }
    model = with_experts(changed, 15, keys)
    config = read(model)
    route = mixture_of(config, 1).router
    assert (route.experts, route.used, route.groups, route.groups_used) == (15, 3, 5, 2)
    assert (route.scoring, route.normalize, route.scale) == ("sigmoid", True, 2.5)
    assert route.choice_bias is not None
    given = np.random.default_rng(1).normal(size=(9, 15))
    reference = reference_model(model, config)
    chosen, weights = reference._route(route, given)
    bias = reference.vector(route.choice_bias)
    for row in range(len(given)):
        expected = chosen_by_hand(given[row], bias)
        order = np.argsort(chosen[row])
        assert chosen[row][order].tolist() == sorted(expected)
        assert np.allclose(weights[row][order], [expected[e] for e in sorted(expected)])


def chosen_by_hand(given: np.ndarray[Any, Any], bias: np.ndarray[Any, Any]) -> dict[int, float]:
    """3 of the 15 experts of 2 of 5 groups, and 2.5 times their shares of the scores."""
    scores = [1.0 / (1.0 + np.exp(-value)) for value in given]
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    best_two = {g: sum(sorted(choice[3 * g : 3 * g + 3])[1:]) for g in range(5)}
    groups = sorted(best_two, key=lambda g: -best_two[g])[:2]
    allowed = [expert for expert in range(15) if expert // 3 in groups]
    used = sorted(allowed, key=lambda expert: -choice[expert])[:3]
    total = sum(scores[expert] for expert in used)
    return {expert: 2.5 * float(scores[expert] / total) for expert in used}


def test_one_group_is_none_and_a_scale_of_zero_is_one(changed: Changed) -> None:
    keys = {"expert_group_count": 1, "expert_group_used_count": 1, "expert_weights_scale": 0.0}
    route = mixture_of(read(with_experts(changed, 6, keys)), 1).router
    assert (route.groups, route.groups_used, route.scale) == (1, 1, 1.0)


@pytest.mark.parametrize(
    ("number", "expected"), [(1, "softmax"), (2, "sigmoid"), (3, "softmax_selected")]
)
def test_scorings(changed: Changed, number: int, expected: str) -> None:
    config = read(changed("bailingmoe2-moe", {"expert_gating_func": number}))
    assert mixture_of(config, 1).router.scoring == expected


@pytest.mark.parametrize("name", ["afmoe-moe", "laguna-moe", "glm4moe-moe", "hy_v3-moe"])
def test_scores_are_sigmoids_by_default(changed: Changed, name: str) -> None:
    config = read(changed(name, {"expert_gating_func": None}))
    assert mixture_of(config, 1).router.scoring == "sigmoid"


HOSTILE: list[tuple[str, dict[str, Any], type[ModelError], str]] = [
    ("dots1-moe", {"expert_used_count": 5}, ConfigError, "expert_used_count"),
    ("dots1-moe", {"expert_used_count": 0}, ConfigError, "expert_used_count"),
    ("dots1-moe", {"expert_used_count": -1}, ConfigError, "expert_used_count"),
    ("dots1-moe", {"expert_used_count": None}, ConfigError, "expert_used_count"),
    ("dots1-moe", {"expert_count": 0}, ConfigError, "expert_count"),
    ("dots1-moe", {"expert_count": -4}, ConfigError, "expert_count"),
    ("dots1-moe", {"expert_count": 1 << 30}, ConfigError, "expert_count"),
    ("dots1-moe", {"expert_count": 1 << 16}, ConfigError, "ffn_gate_inp"),
    ("llama-moe", {"expert_count": 1 << 16}, ConfigError, "ffn_gate_inp"),
    ("llama-moe", {"expert_count": 3}, ConfigError, "ffn_gate_inp"),
    ("llama-moe", {"expert_count": None}, ConfigError, "ffn_up.weight"),
    ("dots1-moe", {"expert_gating_func": 4}, UnsupportedError, "expert_gating_func"),
    ("dots1-moe", {"expert_gating_func": 9}, UnsupportedError, "expert_gating_func"),
    ("dots1-moe", {"expert_gating_func": None}, ConfigError, "expert_gating_func"),
    ("dots1-moe", {"expert_shared_count": None}, ConfigError, "expert_shared_count"),
    ("dots1-moe", {"expert_shared_count": 2}, ConfigError, "shexp"),
    ("dots1-moe", {"expert_feed_forward_length": 0}, ConfigError, "expert_feed_forward_length"),
    ("dots1-moe", {"expert_feed_forward_length": 1 << 30}, ConfigError, "at most 4,194,304"),
    ("dots1-moe", {"expert_feed_forward_length": 1 << 22}, ConfigError, "exps"),
    ("dots1-moe", {"leading_dense_block_count": -1}, ConfigError, "leading_dense_block_count"),
    ("dots1-moe", {"leading_dense_block_count": 2}, ConfigError, "blk.1.ffn_up.weight"),
    ("dots1-moe", {"leading_dense_block_count": 0}, ConfigError, "blk.0.ffn_gate_inp.weight"),
    ("ernie4_5-moe-moe", {"interleave_moe_layer_step": 0}, ConfigError, "interleave_moe"),
    ("llama4-moe", {"interleave_moe_layer_step": None}, ConfigError, "interleave_moe"),
    ("llama4-moe", {"attention.sliding_window": 0}, UnsupportedError, "sliding_window"),
    ("gpt-oss-moe", {"attention.sliding_window": 0}, ConfigError, "sliding_window"),
    ("mimo2-moe", {"attention.sliding_window_pattern": 2}, ConfigError, "sliding_window_pattern"),
    ("grok-moe", {"attn_logit_softcapping": 0.0}, ConfigError, "attn_logit_softcapping"),
    ("dbrx-moe", {"attention.clamp_kqv": None}, ConfigError, "clamp_kqv"),
]


@pytest.mark.parametrize(("name", "keys", "error", "named"), HOSTILE)
def test_numbers_that_cannot_be(
    changed: Changed, name: str, keys: dict[str, Any], error: type[ModelError], named: str
) -> None:
    with pytest.raises(error, match=named.replace(".", r"\.")):
        read(changed(name, keys))


@pytest.mark.parametrize(("groups", "used"), [(7, 2), (5, 0), (5, 5), (15, 2), (30, 2)])
def test_groups_that_cannot_be(changed: Changed, groups: int, used: int) -> None:
    keys = {"expert_group_count": groups, "expert_group_used_count": used}
    with pytest.raises(ConfigError, match="expert_group_count"):
        read(with_experts(changed, 15, keys))


def test_used_experts_by_layer(changed: Changed) -> None:
    used = "expert_used_count"
    config = read(changed("qwen3moe-moe", {used: np.array([3, 3], np.uint32)}))
    assert mixture_of(config, 1).router.used == 3
    with pytest.raises(UnsupportedError, match=used):
        read(changed("qwen3moe-moe", {used: np.array([3, 2], np.uint32)}))


MISSING = [
    ("gpt-oss-moe", "blk.1.attn_sinks.weight"),
    ("gpt-oss-moe", "blk.0.ffn_down_exps.bias"),
    ("gpt-oss-moe", "blk.0.ffn_gate_inp.bias"),
    ("afmoe-moe", "blk.1.exp_probs_b.bias"),
    ("qwen2moe-moe", "blk.1.ffn_gate_inp_shexp.weight"),
    ("qwen3moe-moe", "blk.0.ffn_gate_exps.weight"),
    ("qwen3moe-moe", "blk.0.attn_q_norm.weight"),
    ("phimoe-moe", "output.bias"),
    ("hunyuan-moe-moe", "blk.1.ffn_up_shexp.weight"),
    ("arctic-moe", "blk.1.ffn_norm_exps.weight"),
]


@pytest.mark.parametrize(("name", "missing"), MISSING)
def test_tensors_that_must_be_there(changed: Changed, name: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing.replace(".", r"\.")):
        read(changed(name, tensors={missing: None}))


def test_a_tensor_that_would_be_left_out(changed: Changed) -> None:
    more = {"blk.1.ffn_up_exps.scale": random(4)}
    with pytest.raises(UnsupportedError, match=r"ffn_up_exps\.scale"):
        read(changed("qwen3moe-moe", tensors=more))


# ---- experts ----


def test_fused_gates_of_an_odd_width(changed: Changed, logits: Logits) -> None:
    width, name = 37, "blk.{}.ffn_{}_exps.weight"
    gates, ups = random(4, width, HIDDEN), random(4, width, HIDDEN, seed=9)
    downs = random(4, HIDDEN, width)
    keys = {"expert_feed_forward_length": width}
    fused, apart = {}, {}
    for layer in (0, 1):
        down = {name.format(layer, "down"): downs}
        both = np.concatenate([gates, ups], axis=1)
        fused |= {name.format(layer, "gate_up"): both, **down}
        apart |= {name.format(layer, "gate_up"): None, **down}
        apart |= {name.format(layer, "gate"): gates, name.format(layer, "up"): ups}
    first, other = changed("hy_v3-moe", keys, fused), changed("hy_v3-moe", keys, apart)
    config = read(first)
    experts = mixture_of(config, 1)
    assert experts.gate is not None
    assert experts.gate.matrix == StoredMatrix(
        "blk.1.ffn_gate_up_exps.weight", (4, 2 * width, HIDDEN), 0, width, 2 * width
    )
    assert (experts.width, experts.up.matrix.first) == (width, width)
    assert np.array_equal(logits(first), logits(other))


def test_experts_without_gates(changed: Changed) -> None:
    keys = {f"blk.{layer}.ffn_gate_exps.weight": None for layer in (0, 1)}
    assert mixture_of(read(changed("llama-moe", tensors=keys)), 0).gate is None


def test_width_of_experts_that_share_the_dense_one(changed: Changed) -> None:
    keys = {"expert_feed_forward_length": None, "feed_forward_length": 2 * 192}
    assert mixture_of(read(changed("qwen3moe-moe", keys)), 1).width == 192


def test_leading_dense_layers(changed: Changed) -> None:
    keys = {"leading_dense_block_count": 3}
    config = read(changed("deepseek-moe", keys, layers=[0, 0, 0, 1, 1, 1]))
    assert kinds(config) == [Dense] * 3 + [Mixture] * 3
    found = mixture_of(config, 4)
    assert isinstance(found.shared, Dense)
    assert found.shared.up.matrix.name == "blk.4.ffn_up_shexp.weight"
    all_dense = read(changed("deepseek-moe", {"leading_dense_block_count": 2}, layers=[0, 0]))
    assert kinds(all_dense) == [Dense, Dense]


def test_shared_experts_are_so_many_times_as_wide(changed: Changed) -> None:
    shared = {
        "blk.1.ffn_gate_shexp.weight": random(3 * 192, HIDDEN),
        "blk.1.ffn_up_shexp.weight": random(3 * 192, HIDDEN),
        "blk.1.ffn_down_shexp.weight": random(HIDDEN, 3 * 192),
    }
    found = mixture_of(read(changed("deepseek-moe", {"expert_shared_count": 3}, shared)), 1)
    assert found.shared is not None
    assert found.shared.width == 3 * 192
    without = dict.fromkeys(shared)
    config = read(changed("cohere2moe-moe", {"expert_shared_count": 0}, without))
    assert mixture_of(config, 1).shared is None
    assert [block.scale for block in config.layers[1].blocks] == [1.0, 1.0]


def test_every_second_layer_after_the_dense_one(changed: Changed) -> None:
    config = read(changed("ernie4_5-moe-moe", layers=[0, 1, 1, 1, 1]))
    assert kinds(config) == [Dense, Mixture, Activation, Mixture, Activation]
    unused = [name for name in config.unused_tensors if name.startswith("blk.2.ffn")]
    assert "blk.2.ffn_down_exps.weight" in unused
    assert not any(name.startswith("blk.1.ffn") for name in config.unused_tensors)


def test_every_third_layer_of_llama_4(changed: Changed) -> None:
    # layers 1 and 3 of the golden have experts
    layers = [0, 0, 1, 0, 0, 1, 0, 0]
    keys = {
        "interleave_moe_layer_step": 3,
        "attention.sliding_window_pattern": 4,
        "rope.freq_base_swa": 5000.0,
    }
    config = read(changed("llama4-moe", keys, layers=layers))
    assert kinds(config) == [Mixture if layer in (2, 5) else Dense for layer in range(8)]
    found = [attention_of(config, layer) for layer in range(8)]
    still = [a.rope is None for a in found]
    assert still == [False, False, False, True] * 2
    assert [a.chunk for a in found] == [8192, 8192, 8192, 0] * 2
    assert [a.temperature is not None for a in found] == still
    assert [a.qk_norm is None for a in found] == still
    assert {a.rope.freq_base for a in found if a.rope is not None} == {5000.0}


def test_128_experts_of_llama_4_have_queries_as_they_are(changed: Changed) -> None:
    shapes = {"gate_inp.weight": (128, HIDDEN)}
    shapes |= {f"{name}_exps.weight": (128, 8, HIDDEN) for name in ("gate", "up")}
    shapes |= {"down_exps.weight": (128, HIDDEN, 8), "down_shexp.weight": (HIDDEN, 8)}
    shapes |= {f"{name}_shexp.weight": (8, HIDDEN) for name in ("gate", "up")}
    tensors = {f"blk.{layer}.ffn_{n}": random(*s) for n, s in shapes.items() for layer in (1, 3)}
    keys = {"expert_count": 128, "expert_feed_forward_length": 8}
    config = read(changed("llama4-moe", keys, tensors))
    assert all(a.qk_norm is None for a in config.attentions)
    assert mixture_of(config, 3).router.by_logits
