"""Zamba 2: transformers that take turns before Mamba-2 layers; a folder with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import loaded_group, logits_of, stepping
from urdir.driver.device import Device
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.session import Session
from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weight_sizes import shares_of
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

#: Exact steps are f32 throughout, the reference is f64.
TOLERANCE = 1e-5
HIDDEN, WIDTH, RANK, VOCAB = 64, 96, 8, 71
KINDS = ["mamba", "hybrid", "hybrid", "mamba", "hybrid"]
FIELDS: dict[str, Any] = {
    "model_type": "zamba2",
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": len(KINDS),
    "layers_block_type": KINDS,
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
    "mamba_ngroups": 2,
    "n_mamba_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_mem_blocks": 2,
    "use_shared_attention_adapter": True,
    "use_mem_rope": True,
    "adapter_rank": RANK,
    "rms_norm_eps": 1e-5,
}
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 24)]


def tensors() -> dict[str, Any]:
    """Those of the folder: the transformers' ones are in layers 1 and 2, which first use them."""
    rng, found = np.random.default_rng(5), dict[str, Any]()
    inner, states, heads = 2 * HIDDEN, 2 * 2 * 16, 4

    def add(name: str, *shape: int, scale: float | None = None) -> None:
        values = rng.normal(size=shape) * (scale or shape[-1] ** -0.5)
        values = 1 + values if "norm" in name else values
        found[name] = ("F32", values.astype(np.float32))

    add("model.embed_tokens.weight", VOCAB, HIDDEN, scale=1.0)
    add("model.final_layernorm.weight", HIDDEN)
    uses = [layer for layer, kind in enumerate(KINDS) if kind == "hybrid"]
    for layer, kind in enumerate(KINDS):
        own = f"model.layers.{layer}"
        mamba = own if kind == "mamba" else f"{own}.mamba_decoder"
        add(f"{mamba}.input_layernorm.weight", HIDDEN)
        for name, *shape in (
            *(("A_log", heads), ("D", heads), ("dt_bias", heads), ("norm.weight", inner)),
            *(("conv1d.weight", inner + states, 1, 3), ("conv1d.bias", inner + states)),
            ("in_proj.weight", 2 * inner + states + heads, HIDDEN),
            ("out_proj.weight", HIDDEN, inner),
        ):
            add(f"{mamba}.mamba.{name}", *shape)
        if kind == "hybrid":
            # below the stream, so that rounding is not amplified from layer to layer
            add(f"{own}.linear.weight", HIDDEN, HIDDEN, scale=0.2 * HIDDEN**-0.5)
    rows = {"q": 2 * HIDDEN, "k": HIDDEN, "v": HIDDEN}
    for use in range(len(uses)):
        own = f"model.layers.{uses[use % 2]}.shared_transformer"
        adapters = {"feed_forward.gate_up_proj": (2 * WIDTH, HIDDEN)}
        adapters |= {f"self_attn.linear_{n}": (count, 2 * HIDDEN) for n, count in rows.items()}
        for name, (count, cols) in adapters.items():
            add(f"{own}.{name}_adapter_list.{use}.0.weight", RANK, cols)
            add(f"{own}.{name}_adapter_list.{use}.1.weight", count, RANK)
        if use > 1:
            continue
        add(f"{own}.input_layernorm.weight", 2 * HIDDEN)
        add(f"{own}.pre_ff_layernorm.weight", HIDDEN)
        for n, count in rows.items():
            add(f"{own}.self_attn.{n}_proj.weight", count, 2 * HIDDEN)
        add(f"{own}.self_attn.o_proj.weight", HIDDEN, 2 * HIDDEN)
        add(f"{own}.feed_forward.gate_up_proj.weight", 2 * WIDTH, HIDDEN)
        add(f"{own}.feed_forward.down_proj.weight", HIDDEN, WIDTH)
    return found


@pytest.fixture
def model(make_folder: Callable[..., Path]) -> Iterator[SafetensorsModel]:
    with SafetensorsModel(make_folder(FIELDS, tensors())) as opened:
        yield opened


def test_uses_share_matrices_and_have_adapters_of_their_own(model: SafetensorsModel) -> None:
    layers = Config.of(model).layers
    uses = [block.transformer for layer in layers for block in layer.blocks if block.transformer]
    first, second, third = uses
    assert first.ffn.down == third.ffn.down != second.ffn.down
    assert first.ffn.up.matrix == third.ffn.up.matrix
    lows = [use.attention.q.low for use in uses]
    assert len({low and low.a.name for low in lows}) == 3


def test_logits_are_the_reference_s(
    model: SafetensorsModel, device: Device, reference_model: Any
) -> None:
    """After a prompt, single tokens, and beside another sequence; several devices keep the
    transformers whole."""

    class Rounded(reference_model):  # type: ignore[misc]
        """Products of activations in f16, as prompts have them."""

        def linear(self, linear: Any, x: Any) -> Any:
            return super().linear(linear, x.astype(np.float16).astype(np.float64))

    config = Config.of(model)
    golden = reference_model(model, config).logits(TOKENS)
    usual = relative_rms(Rounded(model, config).logits(TOKENS)[-1], golden[-1])
    settings = SessionSettings(32, "f32", exact=True, sequences=2)
    with (
        Weights.load(model, config, device) as weights,
        stepping(device, weights, settings) as eager,
    ):
        eager.feed(TOKENS[:20])
        found = [eager.logits()[0]]
        eager.feed(TOKENS[:3], 1)
        eager.feed(TOKENS[20:21])
        found += [*eager.logits((0, 1))]
        with Session(device, weights, SessionSettings(32)) as rounded:
            after_prompt = logits_of(rounded, TOKENS)
    assert relative_rms(np.stack(found), golden[[19, 20, 2]]) < TOLERANCE
    assert relative_rms(after_prompt, golden[-1]) < 2 * usual
    assert usual < 1e-2


@pytest.mark.full
def test_logits_on_two_devices_are_the_reference_s(
    model: SafetensorsModel,
    device_name: str,
    needs_gpus: Callable[[int], None],
    reference_model: Any,
) -> None:
    needs_gpus(2)
    config = Config.of(model)
    with loaded_group(device_name, model, shares_of(config, model, 2)) as (group, weights):
        settings = SessionSettings(32, "f32", exact=True)
        with (
            Session(group[0], weights[0], settings, peers=weights[1:]) as session,
            EagerSteps(session) as eager,
        ):
            eager.feed(TOKENS[:20])
            found = [eager.logits()[0]]
            eager.feed(TOKENS[20:21])
            found.append(eager.logits()[0])
    golden = reference_model(model, config).logits(TOKENS)
    assert relative_rms(np.stack(found), golden[[19, 20]]) < TOLERANCE


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"num_mem_blocks": 0}, "own.blocks is 0"),
        ({"adapter_rank": 0}, "own.adapter_rank is 0"),
        ({"num_attention_heads": 3}, "'num_attention_heads' is 3"),
        ({"use_long_context": True}, "'use_long_context' is True"),
        ({"layers_block_type": ["mamba"] * 4 + ["other"]}, "hybrid, mamba"),
    ],
)
def test_impossible_fields_are_refused(
    changed: dict[str, Any], error: str, make_folder: Callable[..., Path]
) -> None:
    folder = make_folder({**FIELDS, **changed}, tensors())
    with (
        pytest.raises((ConfigError, UnsupportedError), match=error),
        SafetensorsModel(folder) as model,
    ):
        Config.of(model)
