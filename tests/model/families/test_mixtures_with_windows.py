"""Which layers of mixtures of experts have windows and turn, what is stored for nothing, and Step
3.5, which has no golden."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from tests.model.families.described import kinds, read, second
from urdir.model.errors import ConfigError
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense, Mixture, Router
from urdir.model.families.stored import Linear, StoredMatrix, StoredVector
from urdir.ptxgen.kernels.activation import Activation

Changed = Callable[..., Any]
Logits = Callable[[Any], np.ndarray[Any, Any]]


def random(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed + sum(shape)).normal(0.0, 0.1, shape).astype(np.float32)


@pytest.fixture
def logits(reference_model: Any) -> Logits:
    return lambda model: reference_model(model, read(model)).logits([3, 1, 4, 1, 5])


# ---- windows and rotation ----


def windows(config: Config) -> list[int]:
    return [a.window for a in config.attentions]


def turns(config: Config) -> list[bool]:
    return [a.rope is not None for a in config.attentions]


PATTERN = "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("name", "layer", "pattern", "expected"),
    [
        ("gpt-oss-moe", 1, None, [1, 0, 1, 0, 1]),
        ("gpt-oss-moe", 1, 3, [1, 1, 0, 1, 1]),
        ("gpt-oss-moe", 1, 0, [1, 1, 1, 1, 1]),
        ("gpt-oss-moe", 1, 1, [0, 0, 0, 0, 0]),
        ("gpt-oss-moe", 1, np.array([0, 0, 1, 1, 0]), [0, 0, 1, 1, 0]),
        ("exaone-moe-moe", 1, None, [1, 1, 1, 0, 1]),
        ("cohere2moe-moe", 1, None, [0, 1, 1, 1, 0]),
        ("laguna-moe", 1, 2, [0, 1, 0, 1, 0]),
    ],
)
def test_which_layers_have_windows(
    changed: Changed, name: str, layer: int, pattern: Any, expected: Any
) -> None:
    keys = {PATTERN: pattern, "leading_dense_block_count": 0}
    config = read(changed(name, keys, layers=[layer] * 5))
    assert windows(config) == [20 * flag for flag in expected]


@pytest.mark.parametrize("name", ["afmoe-moe", "laguna-moe", "mellum-moe", "smallthinker-moe"])
def test_files_without_windows(changed: Changed, name: str) -> None:
    assert windows(read(changed(name, {"attention.sliding_window": 0}))) == [0, 0]


def test_which_layers_turn(changed: Changed) -> None:
    keys = {PATTERN: None, "leading_dense_block_count": 0}

    def of(name: str, layers: Iterable[int], **more: Any) -> list[bool]:
        return turns(read(changed(name, keys | more, layers=list(layers))))

    assert of("afmoe-moe", [1] * 5) == [True, True, True, False, True]
    assert of("exaone-moe-moe", [1] * 5) == [True, True, True, False, True]
    assert of("cohere2moe-moe", [1] * 5) == [False, True, True, True, False]
    assert of("cohere2moe-moe", [0, 1, 1, 1, 1], leading_dense_block_count=1) == [
        *[True] * 4,
        False,
    ]
    assert of("smallthinker-moe", [1] * 6) == [False, True, True, True, False, True]
    assert of("smallthinker-moe", [1] * 4) == [True] * 4
    small = changed("smallthinker-moe", {"attention.sliding_window": 0}, layers=[1] * 6)
    assert turns(read(small)) == [True] * 6


def test_windows_that_turn_otherwise(changed: Changed) -> None:
    scaled = {
        "rope.freq_base": 40000.0,
        "rope.freq_base_swa": None,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
    }
    bases = {}
    for name in ("gpt-oss-moe", "mellum-moe", "laguna-moe", "mimo2-moe"):
        config = read(changed(name, scaled))
        local, full = sorted(config.attentions, key=lambda a: -a.window)
        assert local.rope is not None
        assert full.rope is not None
        assert (full.rope.freq_base, full.rope.scaling.factor) == (40000.0, 8.0)
        bases[name] = local.rope.freq_base, local.rope.scaling.factor
    assert bases == {
        "gpt-oss-moe": (40000.0, 8.0),
        "mellum-moe": (40000.0, 1.0),
        "laguna-moe": (40000.0, 1.0),
        "mimo2-moe": (10000.0, 1.0),
    }


def test_sinks_in_some_layers(changed: Changed) -> None:
    config = read(changed("mimo2-moe", tensors={"blk.0.attn_sinks.weight": None}))
    assert [a.sinks is not None for a in config.attentions] == [False, True]


def test_gates_by_head_or_by_value(changed: Changed) -> None:
    by_head = read(changed("laguna-moe"))
    gates = {f"blk.{i}.attn_gate.weight": random(160, 160) for i in (0, 1)}
    by_value = read(changed("laguna-moe", tensors=gates))
    rows = [c.attentions[0].gate.linear.rows for c in (by_head, by_value) if c.attentions[0].gate]
    assert rows == [2, 160]
    odd = {"blk.1.attn_gate.weight": random(7, 160)}
    with pytest.raises(ConfigError, match=r"blk\.1\.attn_gate\.weight"):
        read(changed("laguna-moe", tensors=odd))


# ---- Step 3.5, which has no golden ----


def step35(made: Changed, **more: Any) -> Any:
    """Three layers, the first dense and without a window: 3 and 6 heads of 20 values."""
    dim, kv, widths = 20, 3, {"ffn": 40, "exp": 24, "shexp": 16}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (50, 48),
        "output.weight": (50, 48),
        "output_norm.weight": (48,),
        "rope_freqs.weight": (dim // 2,),
    }
    for layer, heads in enumerate((3, 6, 6)):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (48,),
            "ffn_norm.weight": (48,),
            "attn_q.weight": (heads * dim, 48),
            "attn_k.weight": (kv * dim, 48),
            "attn_v.weight": (kv * dim, 48),
            "attn_q_norm.weight": (dim,),
            "attn_k_norm.weight": (dim,),
            "attn_gate.weight": (heads, 48),
            "attn_output.weight": (48, heads * dim),
        }
        dense_or_shared, width = ("", widths["ffn"]) if not layer else ("_shexp", widths["shexp"])
        own |= {f"ffn_{n}{dense_or_shared}.weight": (width, 48) for n in ("gate", "up")}
        own[f"ffn_down{dense_or_shared}.weight"] = (48, width)
        if layer:
            own |= {f"ffn_{n}_exps.weight": (5, widths["exp"], 48) for n in ("gate", "up")}
            own |= {"ffn_down_exps.weight": (5, 48, widths["exp"]), "exp_probs_b.bias": (5,)}
            own["ffn_gate_inp.weight"] = (5, 48)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    keys = {
        "block_count": 3,
        "context_length": 64,
        "embedding_length": 48,
        "feed_forward_length": widths["ffn"],
        "expert_feed_forward_length": widths["exp"],
        "expert_shared_feed_forward_length": widths["shexp"],
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 3.0,
        "attention.head_count": np.array([3, 6, 6], np.uint32),
        "attention.head_count_kv": kv,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 4,
        PATTERN: np.array([0, 1, 1]),
        "rope.freq_base": 5e6,
        "rope.freq_base_swa": 1e4,
        "swiglu_clamp_exp": np.array([0.0, 0.0, 7.0], np.float32),
        "swiglu_clamp_shexp": np.array([2.0, 0.0, 16.0], np.float32),
        **more,
    }
    tensors = {name: np.abs(random(*s)) + 0.5 for name, s in shapes.items()}
    return made("step35", keys, tensors)


def test_step_35(made: Changed, logits: Logits) -> None:
    model = step35(made)
    config = read(model)
    full, local, _ = config.attentions
    assert full.rope is not None
    assert local.rope is not None
    assert (full.rope.dim, full.rope.freq_base) == (10, 5e6)
    assert full.rope.factors == StoredVector("rope_freqs.weight", (10,), 0, 5)
    assert (local.rope.dim, local.rope.freq_base, local.rope.factors) == (20, 1e4, None)
    assert windows(config) == [0, 4, 4]
    assert [a.gate.linear.rows for a in config.attentions if a.gate] == [3, 6, 6]
    first, middle, last = (second(config, layer) for layer in range(3))
    assert isinstance(first, Dense)
    assert first.activation == Activation("silu", 2.0, "activated")
    assert isinstance(middle, Mixture)
    assert isinstance(last, Mixture)
    assert middle.activation == Activation("silu")
    assert last.activation == Activation("silu", 7.0, "activated")
    assert last.shared is not None
    assert last.shared.activation == Activation("silu", 16.0, "activated")
    assert last.router == Router(
        Linear(StoredMatrix.whole("blk.2.ffn_gate_inp.weight", 5, 48)),
        2,
        "sigmoid",
        StoredVector.whole("blk.2.exp_probs_b.bias", 5),
        normalize=True,
        scale=3.0,
    )
    assert np.isfinite(logits(model)).all()


def test_half_of_the_turning_values_of_step_35_must_be_even(made: Changed) -> None:
    with pytest.raises(ConfigError, match=r"rope\.dimension_count"):
        read(step35(made, **{"rope.dimension_count": 14}))


# ---- tensors that are stored for nothing ----


@pytest.mark.parametrize("name", ["hy_v3-moe", "mimo2-moe"])
def test_dense_matrices_beside_experts_are_not_used(changed: Changed, name: str) -> None:
    config = read(changed(name))
    assert "blk.1.ffn_up.weight" in config.unused_tensors
    routers: dict[str, Any] = {
        f"blk.0.{n.removeprefix('blk.1.')}": None
        for n in changed(name).tensors
        if n.startswith("blk.1.ffn_") and ("exps" in n or "shexp" in n or "gate_inp" in n)
    }
    bias = "blk.0.exp_probs_b" + (".bias" if name == "mimo2-moe" else "")
    config = read(changed(name, tensors=routers | {bias: None}))
    assert kinds(config) == [Dense, Mixture]
    assert "blk.0.ffn_up.weight" not in config.unused_tensors


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen3vlmoe-moe", {"rope.dimension_sections": None}),
        ("qwen3vlmoe-moe", {"rope.dimension_sections": 3}),
    ],
)
def test_sections_that_must_be_there(changed: Changed, name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rope\.dimension_sections"):
        read(changed(name, keys))
