"""The engine on models of odd sizes with random weights, against the reference in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import loaded_group, logits_of, stepping
from urdir.driver.device import Device
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.families.recurrent import KimiDelta, Lightning, Recurrence
from urdir.model.families.shapes import Shape
from urdir.model.families.share import cut_networks
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weight_sizes import shares_of
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

#: Exact steps are f32 throughout, the reference is f64.
TOLERANCE = 1e-5
#: The prompt's products round activations to f16, and the cache keys and values.
DEFAULT_TOLERANCE = 2e-3
#: With a recurrence by chunks, whose factors are rounded to f16 as well: errors add as squares.
CHUNKED_TOLERANCE = 2**0.5 * DEFAULT_TOLERANCE
_QWEN3 = ("ffn_gate.weight", "attn_q_norm.weight", "attn_k_norm.weight")
#: Six heads of 32 values with a state.
_STATES = {"ssm.conv_kernel": 3, "ssm.inner_size": 192, "ssm.time_step_rank": 6}
#: Latent vectors, and experts after a dense layer.
_LATENT = {
    "attention.kv_lora_rank": 96,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
    "leading_dense_block_count": 1,
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_count": 2,
    "expert_gating_func": 2,
}
#: Shape, type of the matrices.
CASES = {
    "head_dim 80, groups of 3": (
        Shape("llama", 2, 160, 6, 2, 80, 224, 97, False),
        "Q8_0",
    ),
    "head_dim 96, groups of 5, biases": (
        Shape(
            *("qwen2", 1, 96, 5, 1, 96, 160, 101, True),
            layer=("ffn_gate.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias"),
        ),
        "BF16",
    ),
    "head_dim 256, six layers, five with rings": (
        Shape(
            *("gemma3", 6, 64, 3, 1, 256, 96, 67, True),
            {"attention.sliding_window": 5, "attention.layer_norm_rms_epsilon": 1e-6},
            _QWEN3,
        ),
        "F16",
    ),
    "seven experts, groups of 7": (
        Shape(
            *("qwen3moe", 2, 96, 7, 1, 64, 96, 83, False),
            {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 160},
            _QWEN3[1:],
        ),
        "Q5_1",
    ),
    "latent vectors of 3 heads, yarn": (
        Shape(
            *("deepseek2", 2, 96, 3, 1, 64, 160, 83, False),
            {
                **_LATENT,
                "attention.q_lora_rank": 64,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.yarn_log_multiplier": 0.0707,
                "attention.temperature_scale": 0.1,
                "attention.temperature_length": 8,
            },
            ("ffn_gate.weight", "ffn_gate_shexp.weight", "exp_probs_b.bias"),
        ),
        "Q8_0",
    ),
    "five of the tokens, chosen in one of two layers": (
        Shape(
            *("glm-dsa", 2, 96, 3, 1, 64, 160, 83, False),
            {
                **_LATENT,
                "attention.q_lora_rank": 64,
                "attention.indexer.head_count": 7,
                "attention.indexer.key_length": 32,
                "attention.indexer.top_k": 5,
                "attention.indexer.types": np.array([1, 0]),
            },
            ("ffn_gate.weight", "ffn_gate_shexp.weight"),
        ),
        "Q8_0",
    ),
    "five of the tokens in one layer, windows of smaller latent vectors in two": (
        Shape(
            *("dots3note", 3, 96, 3, 1, 64, 160, 83, False),
            {
                **_LATENT,
                "attention.q_lora_rank": 64,
                "attention.indexer.head_count": 7,
                "attention.indexer.key_length": 32,
                "attention.indexer.top_k": 5,
                "attention.indexer.types": np.array([0, 1, 0]),
                "attention.sliding_window": 6,
                "attention.sliding_window_pattern": np.array([1, 0, 1]),
                "attention.kv_lora_rank_swa": 64,
                "attention.key_length_mla_swa": 48,
                "attention.value_length_mla_swa": 32,
                "rope.freq_base_swa": 5000.0,
            },
            ("ffn_gate.weight", "ffn_gate_shexp.weight"),
        ),
        "Q8_0",
    ),
    "streams that are not mixed, sinks and gates of latent vectors": (
        Shape(
            *("hy_v4", 3, 96, 3, 1, 64, 160, 83, False),
            {
                **_LATENT,
                "attention.q_lora_rank": 64,
                "attention.indexer.head_count": 7,
                "attention.indexer.key_length": 40,
                "attention.indexer.top_k": 5,
                "attention.indexer.types": np.array([1, 0, 1]),
                "hyper_connection.count": 4,
                "hyper_connection.epsilon": 1e-4,
                "hyper_connection.magnitude": 1.5,
                "swiglu_clamp_exp": 0.7,
            },
            ("ffn_gate.weight", "ffn_gate_shexp.weight"),
        ),
        "F16",
    ),
    "pools of three tokens, several streams": (
        Shape(
            *("glm5-next", 3, 96, 3, 1, 32, 160, 83, False),
            {
                **_LATENT,
                "attention.head_count_kv": np.array([1, 0, 1]),
                "attention.q_lora_rank": 64,
                "attention.indexer.head_count": 5,
                "attention.indexer.key_length": 32,
                "attention.indexer.top_k": 6,
                "attention.indexer.kpool": 3,
                "attention.indexer.kpool_select_tail": True,
                "kda.head_dim": 32,
                "kda.gate_lower_bound": -5.0,
                "ssm.conv_kernel": 3,
                "rope.dimension_count": None,
                "hyper_connection.count": 4,
                "hyper_connection.sinkhorn_iterations": 3,
                "hyper_connection.epsilon": 1e-6,
            },
            ("ffn_gate.weight", "ffn_gate_shexp.weight"),
        ),
        "F16",
    ),
    "latent vectors whose keys are stored beside values": (
        Shape(
            *("minicpm3", 2, 96, 4, 4, 48, 160, 83, True),
            {
                "attention.q_lora_rank": 64,
                "attention.kv_lora_rank": 96,
                "attention.value_length": 32,
                "rope.dimension_count": 16,
            },
        ),
        "Q8_0",
    ),
    "delta rule, six heads on three": (
        Shape(
            *("qwen35", 4, 96, 3, 1, 64, 160, 71, True),
            {
                **_STATES,
                "ssm.state_size": 32,
                "ssm.group_count": 3,
                "rope.dimension_count": 32,
                "rope.dimension_sections": np.array([6, 5, 5, 0]),
                "full_attention_interval": 3,
            },
        ),
        "Q8_0",
    ),
    "delta rule by channel of 3 heads, latent vectors that stand still": (
        Shape(
            *("kimi-linear", 2, 96, 3, 1, 64, 160, 71, False),
            {
                **_LATENT,
                "attention.head_count_kv": np.array([0, 1]),
                "kda.head_dim": 20,
                "ssm.conv_kernel": 3,
                "expert_weights_scale": 2.5,
            },
            ("ffn_gate.weight", "ffn_gate_shexp.weight"),
        ),
        "F16",
    ),
    "delta rule with a floor, gated latent vectors": (
        Shape(
            *("bailingmoe3", 2, 96, 3, 1, 64, 160, 71, True),
            {
                **_LATENT,
                "attention.head_count_kv": np.array([0, 1]),
                "kda.head_dim": 32,
                "kda.gate_lower_bound": -3.0,
                "ssm.conv_kernel": 4,
                "expert_weights_norm": True,
                "swiglu_clamp_exp": 0.7,
                "swiglu_clamp_shexp": 0.5,
            },
            ("ffn_gate.weight", "ffn_gate_shexp.weight"),
        ),
        "F16",
    ),
    "streams recalled from every layer, experts of a latent vector": (
        Shape(
            *("kimi-k3", 2, 96, 3, 1, 64, 160, 71, False),
            {
                **_LATENT,
                "attention.head_count_kv": np.array([0, 1]),
                "attn_res.block_size": 1,
                "activation.situ_beta": 2.0,
                "activation.situ_linear_beta": 3.0,
                "expert_latent_length": 64,
                "expert_weights_norm": True,
                "kda.head_dim": 20,
                "kda.gate_lower_bound": -5.0,
                "ssm.conv_kernel": 3,
            },
            (
                *("ffn_gate.weight", "ffn_gate_shexp.weight", "attn_gate.weight"),
                "ffn_routed_norm.weight",
            ),
        ),
        "F16",
    ),
    "state space beside attention, scales": (
        Shape(
            *("granitehybrid", 3, 96, 4, 2, 24, 160, 71, True),
            {
                **_STATES,
                "ssm.state_size": 20,
                "ssm.group_count": 2,
                "attention.head_count_kv": np.array([0, 2, 0]),
                "residual_scale": 0.5,
                "embedding_scale": 3.0,
                "logit_scale": 2.0,
                "attention.scale": 0.1,
                "rope.scaling.finetuned": False,
            },
        ),
        "F16",
    ),
    "layers of one network, experts without gates": (
        Shape(
            *("nemotron_h_moe", 4, 96, 4, 2, 32, 160, 71, False),
            {
                **_STATES,
                "ssm.state_size": 16,
                "ssm.group_count": 3,
                "attention.head_count_kv": np.array([0, 2, 0, 0]),
                "feed_forward_length": np.array([0, 0, 64, 64]),
                "expert_count": 6,
                "expert_used_count": 2,
                "expert_feed_forward_length": 64,
                "expert_shared_feed_forward_length": 96,
                "expert_weights_norm": True,
                "expert_weights_scale": 2.5,
            },
            (),
        ),
        "Q8_0",
    ),
    "Mamba by heads beside attention, norms after": (
        Shape(
            *("plamo2", 2, 96, 4, 2, 24, 160, 71, True),
            {
                **_STATES,
                "ssm.state_size": 32,
                "attention.head_count_kv": np.array([0, 2]),
                "attention.value_length": 40,
            },
            ("attn_qkv.weight",),
        ),
        "F16",
    ),
    "Mamba by channel, states of 16": (
        Shape(
            *("mamba", 2, 96, 1, 1, 64, 1, 71, True),
            {
                "ssm.conv_kernel": 4,
                "ssm.inner_size": 256,  # results that kernels pack
                "ssm.state_size": 16,
                "ssm.time_step_rank": 32,
            },
            ("ssm_conv1d.bias",),
        ),
        "Q8_0",
    ),
    "lightning attention of 3 heads, the stream normed": (
        Shape(
            *("minimax-01", 2, 96, 3, 1, 32, 64, 71, False),
            {
                "attention.recurrent_layers": np.array([0, 1]),
                "residual_scale": 1.7,
                "rope.dimension_count": 16,
                "expert_count": 5,
                "expert_used_count": 2,
            },
        ),
        "Q8_0",
    ),
    "eight heads with two of keys": (
        Shape("llama", 1, 64, 8, 2, 32, 256, 97, False),
        "Q4_0",
    ),
    "state space without a norm, one group, beside attention": (
        Shape(
            *("falcon-h1", 1, 96, 4, 2, 24, 160, 71, False),
            {**_STATES, "ssm.state_size": 20, "ssm.group_count": 1},
        ),
        "F16",
    ),
    "delta rule, six heads, those of a key together": (
        Shape(
            *("qwen3next", 2, 96, 4, 2, 64, 160, 71, True),
            {
                **_STATES,
                "ssm.state_size": 32,
                "ssm.group_count": 3,
                "full_attention_interval": 2,
                "expert_count": 3,
                "expert_used_count": 3,
                "expert_feed_forward_length": 96,
                "expert_shared_feed_forward_length": 64,
            },
            ("ffn_gate_shexp.weight",),
        ),
        "Q8_0",
    ),
    "delta rule, a shared expert beside 130": (
        Shape(
            *("qwen3next", 2, 96, 4, 2, 64, 160, 71, True),
            {
                **_STATES,
                "ssm.state_size": 32,
                "ssm.group_count": 2,
                "full_attention_interval": 2,
                "expert_count": 130,
                "expert_used_count": 5,
                "expert_feed_forward_length": 64,
                "expert_shared_feed_forward_length": 64,
            },
            ("ffn_gate_shexp.weight",),
        ),
        "Q8_0",
    ),
    "two shared experts beside 140, chosen by sigmoids": (
        Shape(
            *("glm4moe", 2, 96, 4, 2, 24, 160, 71, False),
            {
                "rope.dimension_count": 12,
                "expert_count": 140,
                "expert_used_count": 6,
                "expert_shared_count": 2,
                "expert_feed_forward_length": 96,
                "leading_dense_block_count": 1,
                "expert_gating_func": 2,
                "expert_weights_norm": True,
                "expert_weights_scale": 2.5,
            },
            ("exp_probs_b.bias",),
        ),
        "Q5_1",
    ),
    "ALiBi of 3 heads, LayerNorm": (
        Shape(
            *("bloom", 2, 96, 3, 3, 32, 160, 71, True),
            {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
        ),
        "F32",
    ),
}


#: What other tests of the default run have, too.
_FULL = {
    "pools of three tokens, several streams",  # a golden has them
    "ALiBi of 3 heads, LayerNorm",  # so do goldens
    "seven experts, groups of 7",
    "latent vectors whose keys are stored beside values",  # on several devices
    "five of the tokens in one layer, windows of smaller latent vectors in two",
    "streams that are not mixed, sinks and gates of latent vectors",
    "head_dim 80, groups of 3",
    "head_dim 256, six layers, five with rings",
    "delta rule, six heads on three",
    "lightning attention of 3 heads, the stream normed",  # on several devices
    "delta rule with a floor, gated latent vectors",
    "state space beside attention, scales",
    "layers of one network, experts without gates",
    "eight heads with two of keys",
    "state space without a norm, one group, beside attention",
    "delta rule, six heads, those of a key together",
}
#: Cases for several devices: how many, and how many networks are whole on each.
RANKS = {
    "head_dim 80, groups of 3": (2, 2),  # heads lie across blocks
    "head_dim 256, six layers, five with rings": (3, 0),
    "seven experts, groups of 7": (2, 0),
    "latent vectors of 3 heads, yarn": (3, 1),  # the experts are too narrow
    "latent vectors whose keys are stored beside values": (4, 0),
    "five of the tokens, chosen in one of two layers": (3, 1),
    "five of the tokens in one layer, windows of smaller latent vectors in two": (3, 2),
    "streams that are not mixed, sinks and gates of latent vectors": (3, 2),
    "pools of three tokens, several streams": (3, 2),
    "delta rule, six heads on three": (3, 0),
    "delta rule by channel of 3 heads, latent vectors that stand still": (3, 1),
    "delta rule with a floor, gated latent vectors": (2, 0),
    "streams recalled from every layer, experts of a latent vector": (2, 0),
    "state space beside attention, scales": (2, 0),
    "layers of one network, experts without gates": (3, 2),
    "Mamba by heads beside attention, norms after": (3, 0),
    "lightning attention of 3 heads, the stream normed": (2, 1),
    "eight heads with two of keys": (8, 0),
    "state space without a norm, one group, beside attention": (3, 0),
    "delta rule, six heads, those of a key together": (3, 0),
    "ALiBi of 3 heads, LayerNorm": (3, 2),
}


#: Tokens after which logits are looked at: of prompts, and of single ones.
COUNTS = (1, 2, 20, 21)


def logits(eager: EagerSteps, tokens: list[int]) -> np.ndarray:
    """After some of the tokens."""
    rows = []
    eager.truncate(0)
    for count in COUNTS:
        eager.feed(tokens[eager.lengths[0] : count])
        rows.append(eager.logits()[0])
    return np.stack(rows)


def random_tokens(vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(0, vocab, COUNTS[-1])]


def errors(device: Device, model: Any, reference_model: Any) -> tuple[float, float]:
    """Against the reference: of exact logits after some tokens; of rounded ones after a prompt."""
    config = Config.of(model)
    tokens = random_tokens(config.vocab_size)
    with (
        Weights.load(model, config, device) as weights,
        stepping(device, weights, SessionSettings(32, "f32", exact=True)) as eager,
    ):
        found = logits(eager, tokens)
        with Session(device, weights, SessionSettings(32)) as session:
            rounded = logits_of(session, tokens)
    golden = reference_model(model, config).logits(tokens)
    exact = relative_rms(found, golden[[count - 1 for count in COUNTS]])
    return exact, relative_rms(rounded, golden[COUNTS[-1] - 1])


def default_tolerance(config: Config) -> float:
    """Of logits after a prompt, in default mode."""
    by_chunks = (Recurrence, KimiDelta, Lightning)
    chunked = any(isinstance(layer.recurrent, by_chunks) for layer in config.layers)
    return CHUNKED_TOLERANCE if chunked else DEFAULT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] if case in _FULL else []) for case in CASES],
)
def test_logits_are_the_reference_s(
    case: str, device: Device, random_model: Callable[..., Any], reference_model: Any
) -> None:
    model = random_model(*CASES[case])
    exact, rounded = errors(device, model, reference_model)
    print(f"default, after a prompt: {rounded:.1e}")
    assert exact <= TOLERANCE
    assert rounded <= default_tolerance(Config.of(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.startswith("lightning") else pytest.mark.full)
        for case in RANKS
    ],
)
def test_logits_on_several_devices_are_the_reference_s(
    case: str,
    device_name: str,
    needs_gpus: Callable[[int], None],
    random_model: Callable[..., Any],
    reference_model: Any,
) -> None:
    (shape, kind), (ranks, whole) = CASES[case], RANKS[case]
    needs_gpus(ranks)
    model = random_model(shape, kind)
    config = Config.of(model)
    shares, tokens = shares_of(config, model, ranks), random_tokens(shape.vocab)
    assert {networks - cut for cut, networks in map(cut_networks, shares)} == {whole}
    with loaded_group(device_name, model, shares) as (group, weights):
        peers = weights[1:]
        settings = SessionSettings(32, "f32", exact=True, sequences=2)
        with (
            Session(group[0], weights[0], settings, peers=peers) as session,
            EagerSteps(session) as eager,
        ):
            found = logits(eager, tokens)
            eager.fork(0, 1)  # states are copied on every rank
            again = logits(eager, tokens)
            with Session(group[0], weights[0], SessionSettings(32), peers=peers) as rounded:
                after_prompt = logits_of(rounded, tokens)
    golden = reference_model(model, config).logits(tokens)
    assert relative_rms(found, golden[[count - 1 for count in COUNTS]]) <= TOLERANCE
    assert (again == found).all()
    assert relative_rms(after_prompt, golden[20]) <= default_tolerance(config)


#: Heads that share a KV head, by layer.
_GROUPS = {
    "attention.head_count": np.array([4, 4]),
    "attention.head_count_kv": np.array([1, 4]),
    "feed_forward_length": np.array([160, 160]),
}


@pytest.mark.parametrize(
    ("split", "shape"),
    [
        ("tensors", CASES["head_dim 96, groups of 5, biases"][0]),
        ("layers", Shape("deci", 2, 96, 4, 1, 64, 160, 97, False, _GROUPS)),
    ],
    ids=["tensors", "layers"],
)
def test_prompts_beside_each_other_on_devices_with_other_groups(
    split: Any,
    shape: Shape,
    device_name: str,
    needs_gpus: Callable[[int], None],
    random_model: Callable[..., Any],
    reference_model: Any,
) -> None:
    """Two of five heads on the first device and three on the other, or groups of four and of one:
    tiles of queries are of fewer rows on the first."""
    needs_gpus(2)
    model = random_model(shape, "Q8_0")
    config = Config.of(model)
    tokens = random_tokens(shape.vocab)
    prompts = tokens[:20], tokens[5:14]
    segments = tuple(Segment(i, 0, len(of), chooses=True) for i, of in enumerate(prompts))
    with (
        loaded_group(device_name, model, shares_of(config, model, 2, split)) as (group, weights),
        Session(
            group[0], weights[0], SessionSettings(256, sequences=2), peers=weights[1:]
        ) as session,
        EagerSteps(session) as eager,
    ):
        for sequence, prompt in enumerate(prompts):
            eager.feed(prompt, sequence)
        eager.launch(Batch((), segments), Output.LOGITS)
        found = session.parts.work["logits"].download(np.float32, (2, shape.vocab))
    reference = reference_model(model, config)
    golden = np.stack([reference.logits(prompt)[-1] for prompt in prompts])
    assert relative_rms(found, golden) <= DEFAULT_TOLERANCE
