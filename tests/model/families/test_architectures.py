"""What families make of sizes and keys that the goldens do not have; facts are llama.cpp's."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families import registry
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.stages import staged
from urdir.model.families.stored import Linear, stored_in
from urdir.model.families.summary import summary
from urdir.model.files.metadata import Metadata
from urdir.model.graph.attention import Attend
from urdir.model.graph.evaluation import Evaluation
from urdir.model.graph.ops import Norm, Rope
from urdir.model.layers.attention import attention
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers as layers_of
from urdir.model.lower.prepared import Prepared
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.ptxgen.kernels.attention.own_token import OwnToken

HIDDEN, HEADS, KV_HEADS, FFN = 64, 4, 2, 96
#: Keys of the generator that many families require.
COMMON = {
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}


def described(
    architecture: str, layers: int, keys: dict[str, Any] | None = None, *tensors: str
) -> Config:
    """The description of a file with those keys and tensors (beside an embedding and an output)."""
    values = {**COMMON, "block_count": layers, **(keys or {})}
    stored = dict.fromkeys(("token_embd.weight", "output.weight", *tensors), (50, HIDDEN))
    keyed = {f"{architecture}.{name}": value for name, value in values.items()}
    return describe(Reader(Metadata(keyed), architecture, stored, 1000))


def test_another_package_announces_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint(name, value, registry.ENTRY_POINTS)
        for name, value in (
            ("mine", "urdir.model.families.architectures.llama:qwen2"),
            ("gone", "urdir.model.families.architectures.llama:gone"),
            ("llama", "urdir.model.families.architectures.llama:gone"),
        )
    ]
    monkeypatch.setattr(registry.metadata, "entry_points", metadata.EntryPoints(points).select)
    biases = [f"blk.{layer}.attn_{name}.bias" for layer in range(2) for name in "qkv"]
    mine, theirs = (described(name, 2, {}, *biases) for name in ("mine", "qwen2"))
    assert mine.architecture == "mine"
    assert replace(mine, architecture="qwen2", ignored_keys=theirs.ignored_keys) == theirs
    with pytest.raises(UnsupportedError, match=r"^entry point gone = 'urdir\..*llama:gone': "):
        described("gone", 2)
    assert described("llama", 2).architecture == "llama"  # urdir's own come first


def attentions(config: Config) -> list[Attention]:
    return list(config.attentions)


@pytest.mark.parametrize(
    ("layers", "turns", "max_bias"), [(32, True, 0), (40, False, 8), (2, False, 0)]
)
def test_baichuan_is_told_by_its_number_of_layers(layers: int, turns: bool, max_bias: int) -> None:
    for mixer in attentions(described("baichuan", layers)):
        assert (mixer.rope is not None, mixer.max_bias) == (turns, max_bias)


@pytest.mark.parametrize(("name", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_hidden_and_heads(name: str, largest: int) -> None:
    keys = {"attention.key_length": 32, "attention.value_length": 32}
    for layers, size in ((largest, HIDDEN // HEADS), (largest + 1, 32)):
        scales = {mixer.scale for mixer in attentions(described(name, layers, keys))}
        assert scales == {1 / math.sqrt(size)}


def test_gemma_2_has_caps_and_windows_unless_told_otherwise() -> None:
    config = described("gemma2", 4)
    assert [mixer.window for mixer in attentions(config)] == [4096, 0, 4096, 0]
    assert {mixer.softcap for mixer in attentions(config)} == {50.0}
    assert (config.softcap, config.embedding_scale) == (30.0, 8.0)
    assert config.tied


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, [9, 9, 9, 9, 9, 0, 9]),
        (3, [9, 9, 0, 9, 9, 0, 9]),
        (1, [0] * 7),
        (0, [9] * 7),
        (np.array([0, 1, 1, 0, 0, 0, 1], np.uint32), [0, 9, 9, 0, 0, 0, 9]),
    ],
)
def test_windows_by_pattern(pattern: Any, windows: list[int]) -> None:
    keys = {"attention.sliding_window": 9, "rope.freq_base": 1e6}
    if pattern is not None:
        keys["attention.sliding_window_pattern"] = pattern
    for mixer, window in zip(attentions(described("gemma3", 7, keys)), windows, strict=True):
        assert mixer.rope is not None
        assert (mixer.window, mixer.rope.freq_base) == (window, 1e4 if window else 1e6)


def test_command_a_turns_in_windows_only() -> None:
    keys = {"attention.sliding_window": 9, "logit_scale": 0.25}
    config = described("cohere2", 8, keys)
    expected = [(9, True), (9, True), (9, True), (0, False)] * 2
    assert [(m.window, m.rope is not None) for m in attentions(config)] == expected
    assert config.logit_scale == 0.25
    assert all(len(layer.blocks) == 1 for layer in config.layers)


def test_command_r_has_norms_of_heads_from_64_layers_on() -> None:
    assert all(mixer.qk_norm is None for mixer in attentions(described("command-r", 63)))
    (norms,) = {mixer.qk_norm for mixer in attentions(described("command-r", 64))[:1]}
    assert norms is not None
    assert norms.k.weight is not None
    assert (norms.k.norm.kind, norms.k.weight.shape) == ("layer", (KV_HEADS, HIDDEN // HEADS))


def own_token(mixer: Attention) -> OwnToken | None:
    """What attention itself does to heads, by its operations; None where it cannot."""
    config: Any = SimpleNamespace(stage=None, hidden=mixer.q.cols)
    step = StepOps(config, 1)
    attention(LayerOps(step, 0), mixer, step.graph.input(step.stream()), 1.0)
    prepared = Prepared.of([op for op in step.graph if isinstance(op, Norm | Rope | Attend)])
    assert prepared is not None
    return prepared.token


@pytest.mark.parametrize(
    ("name", "layers", "fused"),
    [
        ("olmo2", 2, ("row", False)),
        ("hunyuan-dense", 2, ("head", True)),
        ("maincoder", 2, ("head", True)),
        ("command-r", 64, None),
    ],
)
def test_norms_of_queries_and_keys_that_attention_computes(
    name: str, layers: int, fused: tuple[str, bool] | None
) -> None:
    """Over a row or a head, before or after the rotation; no LayerNorm."""
    (token,) = {own_token(mixer) for mixer in attentions(described(name, layers))}
    assert (token is None) == (fused is None)
    if token is not None:
        assert (token.qk_norm_over, token.rope_first) == fused
        assert token.qk_norm
        assert token.rope


def test_norms_that_attention_does_not_compute() -> None:
    """A rotation that makes heads longer before them; keys without the weights that queries have;
    weights for each head; whole rows after the rotation."""
    (mixer,) = set(attentions(described("hunyuan-dense", 2))[:1])
    assert mixer.rope is not None
    assert mixer.qk_norm is not None
    longer = replace(mixer.rope, scaling=replace(mixer.rope.scaling, attn_factor=1.5))
    q = mixer.qk_norm.q
    assert q.weight is not None
    bare = replace(q, weight=None, norm=replace(q.norm, weight=False))
    each = replace(q, weight=q.weight.repeated(HEADS))
    for changed in (
        replace(mixer, rope=longer),
        replace(mixer, qk_norm=replace(mixer.qk_norm, k=bare)),
        replace(mixer, qk_norm=replace(mixer.qk_norm, q=each)),
        replace(mixer, qk_norm=replace(mixer.qk_norm, over="row")),
    ):
        assert own_token(changed) is None, "launches of their own norm and rotate before"
    assert own_token(mixer) is not None


def test_exaone_4_has_windows_with_64_layers() -> None:
    keys = {"attention.sliding_window": 9}
    small, large = (attentions(described("exaone4", layers, keys)) for layers in (30, 64))
    assert {(mixer.window, mixer.rope is not None) for mixer in small} == {(0, True)}
    assert [(m.window, m.rope is not None) for m in large[:4]] == [(9, True)] * 3 + [(0, False)]


def test_smollm_3_does_not_turn_in_every_fourth_layer() -> None:
    assert [m.rope is not None for m in attentions(described("smollm3", 5))] == [
        True,
        True,
        True,
        False,
        True,
    ]


def test_old_files_of_minicpm_have_scales_by_size() -> None:
    config = described("minicpm", 4)
    assert (config.embedding_scale, config.logit_scale) == (12.0, HIDDEN / 256)
    assert {block.scale for layer in config.layers for block in layer.blocks} == {0.7}
    scaled = described("minicpm", 4, {"logit_scale": 2.0, "residual_scale": 0.5})
    assert (scaled.logit_scale, scaled.layers[0].blocks[0].scale) == (0.5, 0.5)


def test_granite_without_fine_tuned_rope_does_not_turn() -> None:
    for told, turns in (({}, True), ({"rope.scaling.finetuned": False}, False)):
        config = described("granite", 2, {"logit_scale": 4.0, "attention.scale": 0.5, **told})
        assert {(m.rope is not None, m.scale) for m in attentions(config)} == {(turns, 0.5)}
        assert config.logit_scale == 0.25


@pytest.mark.parametrize("name", ["hunyuan-dense", "hunyuan_vl"])
def test_experts_are_refused_where_they_are_not_described(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"with 8 experts .{name}.expert_count"):
        described(name, 2, {"expert_count": 8})


def test_ministral_s_queries_grow_by_the_original_context() -> None:
    keys = {"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 32}
    (mixer,) = attentions(described("mistral3", 1, keys))
    assert mixer.temperature is not None
    assert (mixer.temperature.scale, mixer.temperature.floor) == (0.1, 32)


def test_deci_s_layers_have_what_they_have() -> None:
    keys = {
        "attention.head_count": np.array([4, 0, 4, 4], np.uint32),
        "attention.head_count_kv": np.array([2, 0, 0, 1], np.uint32),
        "feed_forward_length": np.array([96, 32, 64, 0], np.uint32),
        "attention.key_length": 16,
        "attention.value_length": 16,
    }
    names = [f"blk.{layer}.attn_output.bias" for layer in (0, 2)] + ["blk.3.attn_norm.weight"]
    config = described("deci", 4, keys, *names)
    kinds = [[type(network) for network in layer.networks] for layer in config.layers]
    assert kinds == [[Attention, Dense], [Dense], [Linear, Dense]]
    assert [m.kv_heads for m in attentions(config)] == [2]
    assert config.unused_tensors == ("blk.2.attn_output.bias", "blk.3.attn_norm.weight")


def test_openelm_s_layers_grow() -> None:
    keys = {
        "attention.head_count": np.array([4, 6], np.uint32),
        "attention.head_count_kv": np.array([1, 3], np.uint32),
        "feed_forward_length": np.array([32, 96], np.uint32),
        "attention.key_length": 8,
        "attention.value_length": 8,
    }
    config = described("openelm", 2, keys, "blk.0.attn_qkv.weight", "blk.1.attn_qkv.weight")
    shapes = {reference.name: reference.shape for reference in stored_in(config)}
    assert shapes["blk.0.attn_qkv.weight"] == (6 * 8, HIDDEN)
    assert shapes["blk.1.attn_qkv.weight"] == (12 * 8, HIDDEN)
    assert shapes["blk.1.ffn_down.weight"] == (HIDDEN, 96)


@pytest.mark.parametrize(
    ("tensors", "norms"),
    [((), ("attn_norm", "attn_norm")), (("attn_norm_2",), ("attn_norm_2", "attn_norm"))],
)
def test_falcon_s_attention_may_have_a_norm_of_its_own(
    tensors: tuple[str, ...], norms: tuple[str, ...]
) -> None:
    config = described("falcon", 1, {}, *(f"blk.0.{name}.weight" for name in tensors))
    (block,) = config.layers[0].blocks
    found = [branch.norm and branch.norm.weight for branch in block.branches]
    assert [weight and weight.name for weight in found] == [f"blk.0.{n}.weight" for n in norms]


def test_stablelm_without_a_second_norm_is_parallel() -> None:
    assert len(described("stablelm", 1).layers[0].blocks) == 1
    assert len(described("stablelm", 1, {}, "blk.0.ffn_norm.weight").layers[0].blocks) == 2


def test_gpt_neox_says_whether_it_is_parallel() -> None:
    for told, blocks in ((True, 1), (False, 2)):
        config = described("gptneox", 1, {"use_parallel_residual": told})
        assert len(config.layers[0].blocks) == blocks
    with pytest.raises(ConfigError, match=r"gptneox\.use_parallel_residual"):
        described("gptneox", 1)


def test_hrm_text_runs_two_stacks_by_turns() -> None:
    keys = {"hrm.layers_per_stack": 2, "hrm.h_cycles": 2, "hrm.l_cycles": 1}
    config = described("hrm_text", 8, keys)
    assert [mixer.q.matrix.name[4] for mixer in attentions(config)] == list("01230123")
    assert [(layer.saves, layer.adds) for layer in config.layers[1::2]] == [
        ("l", "h"),
        ("h", "l"),
        ("l", "h"),
        ("h", None),
    ]
    assert all(layer.output_norm is None for layer in config.layers[::2])
    assert (config.saves, config.output_norm) == ("h", None)
    with pytest.raises(ConfigError, match=r"hrm_text\.block_count is 9"):
        described("hrm_text", 9, keys)


@pytest.mark.parametrize(("skips", "between"), [(False, True), (True, False)])
def test_nanbeige_runs_its_layers_again(skips: bool, between: bool) -> None:
    config = described("nanbeige", 2, {"num_loops": 3, "skip_loop_final_norm": skips})
    assert [mixer.q.matrix.name[4] for mixer in attentions(config)] == list("010101")
    found = [layer.output_norm is not None for layer in config.layers]
    assert found == [False, between, False, between, False, False]


GEMMA4 = {
    "attention.sliding_window": 9,
    "attention.sliding_window_pattern": np.array([1, 1, 0, 1, 0], np.uint32),
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.shared_kv_layers": 2,
    "rope.dimension_count_swa": 16,
    "embedding_length_per_layer_input": 0,
}


def test_gemma_4_shares_keys_and_values_by_kind_of_layer() -> None:
    config = described("gemma4", 5, GEMMA4, "blk.3.attn_k.weight", "blk.0.attn_v.weight")
    mixers = attentions(config)
    assert [mixer.shares_cache_of for mixer in mixers] == [None, None, None, 1, 2]
    assert [(m.key_dim, m.window) for m in mixers[1:3]] == [(16, 9), (32, 0)]
    assert [(m.k is not None, m.v is not None) for m in mixers] == [
        (True, True),
        (True, False),
        (True, False),
        (False, False),
        (False, False),
    ]
    assert config.unused_tensors == ("blk.3.attn_k.weight",)
    factors = mixers[2].rope and mixers[2].rope.factors
    assert factors is not None
    assert (factors.shape, factors.size) == ((16,), 16)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.shared_kv_layers", 5),
        ("attention.shared_kv_layers", 3),
        ("attention.value_length", 16),
    ],
)
def test_what_gemma_4_cannot_be_is_named(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=r"shared_kv_layers|value_length is 16"):
        described("gemma4", 5, {**GEMMA4, key: value})


def test_minimax_m3_takes_contexts_that_have_all_blocks() -> None:
    """Longer sequences are sparse in layers with experts, which are no part of the description."""
    keys = {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "attention.indexer.block_size": 8,
    }
    for blocks, context in ((3, 24), (100, 128)):
        config = described("minimax-m3", 2, keys | {"attention.indexer.top_k": blocks})
        assert config.context_length == context
    with pytest.raises(ConfigError, match=r"indexer\.top_k"):
        described("minimax-m3", 2, keys)


def test_kimi_k3_banks_as_many_streams_as_kernels_recall() -> None:
    keys = {
        **{"attention.key_length_mla": 24, "attention.value_length_mla": 16},
        **{"attention.kv_lora_rank": 32, "rope.dimension_count": 8},
        **{"activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0},
        "leading_dense_block_count": 70,
    }
    for every, banks in ((0, 0), (3, 22), (64, 2)):
        config = described("kimi-k3", 65, keys | {"attn_res.block_size": every})
        assert config.banked(65) == banks
        assert [layer.blocks[0].banks for layer in config.layers[:2]] == [every > 0, False]
    with pytest.raises(UnsupportedError, match="more than 32"):
        described("kimi-k3", 65, keys | {"attn_res.block_size": 2})


def test_cogvlm_does_not_use_its_matrices_for_pictures() -> None:
    pictures = [f"blk.1.vis_{name}.weight" for name in ("attn_qkv", "gate", "down")]
    keys = {"rope.freq_base": 5e5, "attention.head_count_kv": HEADS}
    config = described("cogvlm", 2, keys, "blk.0.attn_qkv.weight", *pictures)
    assert config.unused_tensors == tuple(pictures)
    first, second = attentions(config)
    assert {first.q.matrix.name, first.v.matrix.name} == {"blk.0.attn_qkv.weight"}
    assert first.rope is not None
    assert (first.rope.style, first.rope.freq_base) == ("half", 1e4)
    assert second.q.matrix.name == "blk.1.attn_q.weight"


def test_heads_of_latent_vectors_whose_columns_are_in_an_order_are_refused() -> None:
    keys = {"attention.kv_lora_rank": 32, "attention.q_lora_rank": 32, "attention.key_length": 24,
            "attention.value_length": 16, "rope.dimension_count": 8}  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"attn_kv_b\.weight' has columns in an order"):
        described("minicpm3", 1, keys, "blk.0.attn_kv_b.order")


@pytest.mark.parametrize("name", ["ffn_gate_inp", "ffn_down_exps"])
def test_orders_of_columns_that_no_launch_takes_are_refused(name: str) -> None:
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    with pytest.raises(UnsupportedError, match=rf"{name}\.weight' has columns in an order"):
        described("qwen3moe", 1, keys, f"blk.0.{name}.order")


def test_orders_of_experts_of_odd_columns_are_refused() -> None:
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    keys |= {"embedding_length": 72}
    with pytest.raises(UnsupportedError, match=r"ffn_up_exps.* has 72 columns in orders"):
        described("qwen3moe", 1, keys, "blk.0.ffn_up_exps.order")


def test_deepseek_ocr_is_deepseek_with_llama_s_attention() -> None:
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    keys |= {"expert_shared_count": 2, "leading_dense_block_count": 1}
    config = described("deepseek2-ocr", 2, keys)
    dense, mixture = (layer.networks[1] for layer in config.layers)
    assert isinstance(dense, Dense)
    assert isinstance(mixture, Mixture)
    assert mixture.shared is not None
    assert (mixture.router.scoring, mixture.shared.width) == ("softmax", 64)
    assert all(
        of.latent is None and of.rope.style == "half" for of in attentions(config) if of.rope
    )


@pytest.mark.parametrize("name", ["attn_q", "attn_output", "ffn_gate", "ffn_down"])
def test_a_factor_of_bitnet_multiplies_a_product(
    name: str, changed: Any, reference_model: Any
) -> None:
    """As if its matrix were larger: for queries the scale of scores is, too."""
    factors = {f"blk.{layer}.{name}.scale": np.array([1.5]) for layer in (0, 1)}
    model = changed("bitnet-dense", tensors=factors)
    plain = changed("bitnet-dense")
    matrices = {}
    for layer in (0, 1):
        at = f"blk.{layer}.{name}.weight"
        matrices[at] = 1.5 * reference_model(plain, described_by(plain)).tensor(at)
    wanted = reference_model(changed("bitnet-dense", tensors=matrices), described_by(plain))
    found = reference_model(model, described_by(model))
    step = StepOps(described_by(model), 3)
    x = layers_of(step, embedding(step))
    assert x is not None
    logits = head(step, x)
    by_graph = step.graph.evaluate(Evaluation(found, [3, 1, 4], slice(None)))[logits]
    expected = wanted.logits([3, 1, 4])
    for made in (by_graph, found.logits([3, 1, 4])):
        np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def described_by(model: Any) -> Any:
    return describe(Reader.of(model))


def test_later_layers_of_gemma_3n_read_caches_of_their_kind(changed: Any) -> None:
    sources = [of.shares_cache_of for of in described_by(changed("gemma3n-dense")).attentions]
    assert sources == [None] * 20 + [18, 18]
    pattern = np.ones(22, np.int32)
    model = changed("gemma3n-dense", {"attention.sliding_window_pattern": pattern})
    with pytest.raises(ConfigError, match="layers 18 and 19 must have a window and none"):
        described_by(model)


def test_layers_that_read_the_first_one_s_values_are_not_split(changed: Any) -> None:
    with pytest.raises(UnsupportedError, match="values of the first one cannot be split by layers"):
        staged(described_by(changed("rwkv7-dense")), [1, 1], 1, 2)


def test_time_mixing_verifies_no_drafts(changed: Any) -> None:
    config = described_by(changed("rwkv6-dense"))
    assert RecurrentShape.of(config, 1).nbytes == 4 * 2 * (2 * 128 + 128 * 64)
    with pytest.raises(UnsupportedError, match="drafts of a model with time mixing"):
        RecurrentShape.of(config, 1, drafts=3)


def test_layers_without_an_indexer_follow_one_with_attention(changed: Any) -> None:
    """Layers of delta rules have none, whatever the file says of them."""
    kinds = {"attention.head_count_kv": np.array([0, 1, 1, 0])}
    kinds["attention.indexer.types"] = np.array([0, 1, 0, 0])
    found = described_by(changed("glm5-next", kinds)).attentions
    assert [(of.indexer is not None, of.follows_indexer) for of in found] == [
        (True, False),
        (False, True),
    ]
    kinds["attention.indexer.types"] = np.array([1, 0, 1, 1])
    with pytest.raises(ConfigError, match="layer 1, the first with attention, has no indexer"):
        described_by(changed("glm5-next", kinds))


def test_heads_for_predicting_several_tokens_attend_to_all(changed: Any) -> None:
    """Whatever the file says of indexers of their layers."""
    keys: dict[str, Any] = {"block_count": 3, "nextn_predict_layers": 1}
    keys["attention.indexer.types"] = np.array([1, 0, 1])
    model = changed("glm-dsa-shared", keys)
    found = describe(Reader.of(model, nextn=True))
    assert [of.indexer is not None for of in found.attentions] == [True, False]
    (head,) = found.nextn
    assert head.layer.attention.indexer is None
    assert not head.layer.attention.follows_indexer


def test_layers_of_dots_note_have_a_window_or_an_indexer(changed: Any) -> None:
    found = described_by(changed("dots3note")).attentions
    assert [(of.window, of.indexer is None, of.value_dim) for of in found[:2]] == [
        (0, False, 64),
        (20, True, 32),
    ]
    with pytest.raises(ConfigError, match="layer 2 has neither window nor indexer"):
        described_by(changed("dots3note", {"attention.indexer.types": np.array([1, 0, 0, 0])}))
    with pytest.raises(UnsupportedError, match=r"rope\.dimension_count_swa: not 32"):
        described_by(changed("dots3note", {"rope.dimension_count_swa": 16}))


def test_hunyuan_4_selects_as_the_layer_before_or_not_at_all(changed: Any) -> None:
    found = described_by(changed("hy_v4")).attentions
    assert [of.follows_indexer for of in found] == [False, True, False]
    first = found[0].indexer
    assert first is not None
    # of heads of 64 values the last 32 rotate
    assert first.k.matrix.runs == ((32, 64), (0, 32))
    assert first.k_norm.bias is not None
    assert first.k_norm.bias.runs == first.k.matrix.runs
    dense = described_by(changed("hy_v4", {"attention.indexer.top_k": 0}))
    assert not any(of.indexer or of.follows_indexer for of in dense.attentions)
    assert "blk.0.indexer.proj.weight" in dense.unused_tensors
    with pytest.raises(ConfigError, match="layer 0, the first with attention, has no indexer"):
        described_by(changed("hy_v4", {"attention.indexer.types": None}))


def test_blocks_of_tokens_are_described(changed: Any) -> None:
    text = summary(described_by(changed("deepseek4")))
    for fact in (
        "window 20",
        "index heads 8, index dim 128",
        "tokens of a block 4, blocks selected 8",
        "tokens of a block 128",
        "output groups 2",
        "weighted sum of streams",
    ):
        assert fact in text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.compress_ratios", np.array([0, 4, 64, 4]), "compress_ratios has 64: 0, 4, 128"),
        ("attention.compress_ratios", np.array([0, 4]), "compress_ratios' has 2 values for 4"),
        ("attention.head_count_kv", 2, "head_count_kv is 2, with keys of 64"),
        ("attention.value_length", 32, "values of 32: one head of a multiple of 8 values"),
        ("attention.output_group_count", 3, "4 heads in 3 groups"),
        ("attention.indexer.top_k", 1 << 13, "selects 8192 blocks"),
        ("attention.indexer.key_length", 16, "is 16, but 32 values rotate"),
        ("rope.dimension_count", 12, "rope.dimension_count is 12: multiples of 8"),
        ("expert_gating_func", 2, "expert_gating_func is 2: 4"),
        ("hash_layer_count", 5, "hash_layer_count is 5 of 4 layers"),
        ("hyper_connection.count", 2, "hyper_connection.count is 2: 4 streams"),
    ],
)
def test_numbers_of_blocks_that_are_refused(
    changed: Any, key: str, value: Any, message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        described_by(changed("deepseek4", {key: value}))
