"""Files with drafts: what does not fit a model is refused by name, and so is what lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.model.families.test_hostile import VALUES, check, with_key, with_tensor
from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.dflash import dflash
from urdir.model.families.draft_file import read_token_map, reads_of
from urdir.model.families.eagle3 import eagle3
from urdir.model.families.gemma4_assistant import gemma4_assistant
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.stored import stored_in
from urdir.model.families.tapped import nextn_heads, tap, tapped

Golden = Callable[[str], Any]
HEADS = ("mtp-qwen35-own", "mtp-deepseek2-bigram", "mtp-mimo2")
DRAFTS = ("eagle3-own.draft", "eagle3-d2t.draft", "eagle3-shared.draft")
REFUSALS = (ConfigError, UnsupportedError)


@pytest.fixture
def target(golden: Golden) -> Config:
    """The model of the drafts: four layers of 128 values, 128 tokens."""
    return Config.of(golden("target-any"))


def without(file: Any, *names: str) -> Any:
    return replace(file, tensors={n: t for n, t in file.tensors.items() if n not in names})


def check_described(read: Callable[[], Any]) -> None:
    """A file is refused with a short text, or what it describes can be run."""
    text, found = "", None
    try:
        found = read()
    except REFUSALS as error:
        text = str(error)
    assert len(text) < 500
    check(found)


# ---- heads for predicting several tokens ----


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_described_where_they_are_wanted(name: str, golden: Golden) -> None:
    file = golden(name)
    config, whole = Config.of(file), Config.of(file, nextn=True)
    count = file.metadata[f"{file.architecture}.nextn_predict_layers"]
    assert (len(config.nextn), len(whole.nextn)) == (0, count)
    assert whole.layers == config.layers
    named = {of.name for of in stored_in(whole)} | set(whole.unused_tensors)
    assert named == set(file.tensors)
    own = f"blk.{whole.n_layers}.nextn."
    head, has_own = whole.nextn[0], name.endswith("-own")
    assert (head.embedding.name == f"{own}embed_tokens.weight") == has_own
    assert (head.output.matrix.name == f"{own}shared_head_head.weight") == has_own
    assert head.norm.weight is not None
    assert head.norm.weight.name == f"{own}shared_head_norm.weight"
    assert nextn_heads(whole).layers == tuple(head.layer for head in whole.nextn)
    assert set(config.ropes) <= set(whole.ropes)


def test_a_head_takes_the_model_s_norm_where_it_has_none(golden: Golden) -> None:
    file = golden("mtp-mimo2")
    blocks = [f"blk.{layer}." for layer in (2, 3)]
    file = without(file, *(f"{at}nextn.shared_head_norm.weight" for at in blocks))
    second = Config.of(file, nextn=True)
    assert [h.norm.weight.name for h in second.nextn if h.norm.weight] == [
        f"{at}layer_output_norm.weight" for at in blocks
    ]
    file = without(file, *(f"{at}layer_output_norm.weight" for at in blocks))
    third = Config.of(file, nextn=True)
    assert [head.norm for head in third.nextn] == [third.output_norm] * 2


@pytest.mark.parametrize("name", HEADS)
def test_a_tensor_of_a_head_is_missing_or_has_another_shape(name: str, golden: Golden) -> None:
    file = golden(name)
    layer = Config.of(file).n_layers
    unused = set(Config.of(file, nextn=True).unused_tensors)
    may_lack = ("embed_tokens", "shared_head", "layer_output_norm", "attn_sinks", "exp_probs_b")
    for tensor in (n for n in file.tensors if n.startswith(f"blk.{layer}.") and n not in unused):
        if not any(part in tensor for part in may_lack):
            with pytest.raises(REFUSALS, match="tensor '"):
                Config.of(without(file, tensor), nextn=True)
        shape = (*file.tensors[tensor].shape[:-1], file.tensors[tensor].shape[-1] + 1)
        with pytest.raises(REFUSALS, match="tensor '"):
            Config.of(with_tensor(file, tensor, shape=shape), nextn=True)


@pytest.mark.parametrize("name", HEADS)
def test_heads_have_values_that_cannot_be(name: str, golden: Golden) -> None:
    file = golden(name)
    reader = Reader.of(file, nextn=True)
    describe(reader)
    for key in sorted(reader.asked_keys):
        for value in VALUES.values():
            check_described(partial(Config.of, with_key(file, key, value), nextn=True))


@pytest.mark.parametrize("count", [-1, 3, 4, 2**31 - 1, 2**40])
def test_more_heads_than_layers(count: int, golden: Golden) -> None:
    file = with_key(golden("mtp-qwen35-own"), "qwen35.nextn_predict_layers", count)
    with pytest.raises(REFUSALS, match=r"nextn_predict_layers|32 bits"):
        Config.of(file, nextn=True)


def test_a_family_without_heads_refuses_them(golden: Golden) -> None:
    file = with_key(golden("target-any"), "llama.nextn_predict_layers", 1)
    Config.of(file)
    with pytest.raises(UnsupportedError, match=r"of llama \(llama.nextn_predict_layers\)"):
        Config.of(file, nextn=True)


# ---- streams that are kept ----


def test_streams_are_kept_under_names(target: Config) -> None:
    kept = tapped(target, [0, 2, 4, 2])
    assert kept.saved_streams == (tap(0), tap(2), tap(4))
    assert [layer.saves for layer in kept.layers] == [None, tap(2), None, tap(4)]
    assert [*stored_in(kept)] == [*stored_in(target)]
    for layer in (-1, 5):
        with pytest.raises(UnsupportedError, match=f"layer {layer} of 4 layers"):
            tapped(target, [layer])
    with pytest.raises(UnsupportedError, match="layer 2 of llama: it is kept or added to already"):
        tapped(kept, [2])


# ---- EAGLE-3 ----


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_is_described_for_its_model(name: str, golden: Golden, target: Config) -> None:
    file = golden(name)
    draft = eagle3(file, target)
    named = {of.name for of in stored_in(draft) if of not in draft.lent}
    assert named | set(draft.unused_tensors) == set(file.tensors)
    has_own = "token_embd.weight" in file.tensors, "output.weight" in file.tensors
    assert (not draft.shares_embedding, not draft.shares_output) == has_own
    assert len(draft.lent) == 2 - sum(has_own)
    assert draft.mixer.q.cols == 2 * draft.hidden
    assert draft.vocab_size == (72 if draft.token_map else 128)
    assert not draft.ignored_keys or "vocab_size" in draft.ignored_keys[0]
    reads = reads_of(file)
    assert (reads.layers, reads.hidden) == (draft.target_layers, draft.target_hidden)
    assert reads.own_hidden == draft.hidden


def test_what_does_not_fit_a_model_is_refused(golden: Golden, target: Config) -> None:
    shared, own, mapped = (golden(name) for name in (DRAFTS[2], DRAFTS[0], DRAFTS[1]))
    nothing = replace(target, layers=target.layers[:2])
    for file, config, what in [
        (shared, replace(target, hidden=96), "hidden states of 128 values .* model's have 96"),
        (own, replace(target, layers=target.layers[:3]), "before layer 4 .* has 3 layers"),
        (with_key(shared, "eagle3.target_layers", np.array([1, 2, -1])), target, "layer -1"),
        (
            with_key(shared, "eagle3.target_layers", np.zeros(17, np.int32)),
            target,
            "17 streams of the model",
        ),
        (with_key(shared, "eagle3.target_layers", None), nothing, "layer -1 .* has 2 layers"),
        (with_key(shared, "eagle3.target_hidden_size", 256), target, "tensor 'fc.weight'"),
        (with_key(shared, "eagle3.block_count", 2), target, "a draft of 2 layers"),
        (own, replace(target, vocab_size=120), r"'(output|token_embd).weight' has shape"),
        (without(own, "output.weight"), target, "64 values .* without output of its own"),
        (without(own, "enc.output_norm.weight"), target, "'enc.output_norm.weight' .* missing"),
        (without(mapped, "output.weight"), target, "'d2t' needs an output"),
        (with_tensor(mapped, "d2t", shape=(8, 9)), target, r"'d2t' has shape \(8, 9\)"),
        (with_tensor(mapped, "d2t", shape=(71,)), target, "'output.weight' has shape"),
        (with_tensor(mapped, "d2t", type_id=26), target, "'d2t' has type I32"),
        (without(shared, "fc.weight"), target, "'fc.weight' .* is missing"),
    ]:
        with pytest.raises(REFUSALS, match=what) as caught:
            eagle3(file, config)
        assert str(caught.value).startswith(f"{file.path}: ")


def test_a_map_to_tokens_that_the_model_has_not(golden: Golden, target: Config) -> None:
    file = golden("eagle3-d2t.draft")
    tokens = read_token_map(file, target)
    assert tokens.shape == (72,)
    assert len(set(tokens.tolist())) == 72
    with pytest.raises(ConfigError, match=r"'d2t' maps token \d+ to 1\d\d, the model has 100"):
        read_token_map(file, replace(target, vocab_size=100))


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_have_values_that_cannot_be(name: str, golden: Golden, target: Config) -> None:
    file = golden(name)
    for key in (key for key in file.metadata if key.startswith("eagle3.")):
        for value in [*VALUES.values(), None]:
            changed = with_key(file, key, value)
            check_described(partial(eagle3, changed, target))
            check_described(partial(reads_of, changed))


# ---- DFlash ----


def test_blocks_are_described_for_their_model(golden: Golden, target: Config) -> None:
    file = golden("dflash-d2t.draft")
    draft = dflash(file, target)
    named = {of.name for of in stored_in(draft) if of not in draft.lent}
    assert named | set(draft.unused_tensors) == set(file.tensors)
    assert (draft.block, draft.mask, draft.causal) == (5, 127, False)
    assert [draft.mixer(layer)[0].window for layer in range(2)] == [12, 0]
    assert dflash(with_key(file, "dflash.attention.causal", True), target).causal


def test_blocks_that_do_not_fit_a_model_are_refused(golden: Golden, target: Config) -> None:
    file = golden("dflash-d2t.draft")
    selects = {**file.tensors, "selector_hidden.weight": file.tensors["fc.weight"]}
    for changed, config, what in [
        (replace(file, tensors=selects), target, "'selector_hidden.weight': .* beside 'd2t'"),
        (file, replace(target, hidden=96), "hidden states of 128 values"),
        (file, replace(target, vocab_size=120), "mask_token_id' is 127, the model has 120 tokens"),
        (file, replace(target, layers=target.layers[:2]), "before layer 3 .* has 2 layers"),
        (with_key(file, "tokenizer.ggml.mask_token_id", None), target, "mask_token_id' is missing"),
        (with_key(file, "dflash.block_size", 65), target, "65 rows of a block"),
        (with_key(file, "dflash.block_size", None), target, "block_size' is missing"),
        (without(file, "blk.0.attn_v.weight"), target, "'blk.0.attn_v.weight' .* is missing"),
        (without(file, "enc.output_norm.weight"), target, "'enc.output_norm.weight' .* missing"),
    ]:
        with pytest.raises(REFUSALS, match=what):
            dflash(changed, config)


def test_blocks_have_values_that_cannot_be(golden: Golden, target: Config) -> None:
    file = golden("dflash-d2t.draft")
    keys = [key for key in file.metadata if key.startswith("dflash.")]
    for key in [*keys, "tokenizer.ggml.mask_token_id"]:
        for value in [*VALUES.values(), None]:
            check_described(partial(dflash, with_key(file, key, value), target))


# ---- Gemma 4's assistant ----

ASSISTANT = "gemma4-assistant"


def test_an_assistant_reads_the_caches_of_its_model(golden: Golden) -> None:
    file = golden("gemma4assistant-e.draft")
    model = Config.of(golden("gemma4assistant-e.target"))
    draft = gemma4_assistant(file, model)
    assert {of.name for of in stored_in(draft)} == set(file.tensors)
    sources = [draft.mixer(layer)[0].shares_cache_of for layer in range(4)]
    assert sources == [model.n_layers - 2] * 3 + [model.n_layers - 1]
    assert (draft.hidden, draft.target_hidden) == (64, 128)
    assert not draft.ignored_keys or "vocab_size" in draft.ignored_keys[0]


def test_assistants_that_do_not_fit_a_model_are_refused(golden: Golden, target: Config) -> None:
    file = golden("gemma4assistant-e.draft")
    model = Config.of(golden("gemma4assistant-e.target"))
    windows = np.array([True, True, True, True])
    for changed, config, what in [
        (file, target, "keys and values of layer 2 of the model"),
        (file, replace(model, layers=model.layers[:1]), "keys and values of layer -1"),
        (file, replace(model, hidden=96), "hidden states of 128 values"),
        (file, replace(model, vocab_size=120), "'token_embd.weight' has shape"),
        (
            with_key(file, f"{ASSISTANT}.attention.sliding_window_pattern", windows),
            model,
            r"'blk\.3\.attn_q\.weight' has shape",
        ),
        (
            with_key(file, f"{ASSISTANT}.embedding_length_out", None),
            model,
            "length_out' is missing",
        ),
        (without(file, "nextn.pre_projection.weight"), model, "pre_projection.weight' .* missing"),
        (without(file, "blk.0.attn_q.weight"), model, "'blk.0.attn_q.weight' .* missing"),
    ]:
        with pytest.raises(REFUSALS, match=what) as caught:
            gemma4_assistant(changed, config)
        assert str(caught.value).startswith(f"{file.path}: ")


def test_assistants_have_values_that_cannot_be(golden: Golden) -> None:
    file = golden("gemma4assistant-e.draft")
    model = Config.of(golden("gemma4assistant-e.target"))
    for key in [key for key in file.metadata if key.startswith(ASSISTANT)]:
        for value in [*VALUES.values(), None]:
            check_described(partial(gemma4_assistant, with_key(file, key, value), model))


# ---- DSpark ----


def test_blocks_whose_tokens_are_chosen_one_after_the_other(golden: Golden, target: Config) -> None:
    anchored, bonus = (golden(f"dspark-{name}.draft") for name in ("anchor", "bonus"))
    for file, most in ((anchored, 5), (bonus, 4)):
        draft = dflash(file, target)
        assert draft.markov is not None
        assert (draft.markov.previous.shape, draft.markov.next.cols) == ((128, 32), 32)
        assert (draft.block, draft.most, draft.anchored) == (5, most, most == 5)
        confidence = draft.markov.confidence
        assert confidence is None or (confidence.rows, confidence.cols) == (1, 128 + 32)
        assert (confidence is None) == ("conf_proj.weight" not in file.tensors)
    key = "dflash.sample_from_anchor"
    for changed, what in [
        (with_key(golden("dflash-d2t.draft"), key, True), "'markov_w1'"),
        (without(bonus, "markov_w2.weight"), "'markov_w2.weight' .* is missing"),
        (without(bonus, "markov_w1.weight"), "'markov_w2.weight'"),
    ]:
        with pytest.raises(REFUSALS, match=what):
            dflash(changed, target)
    with pytest.raises(UnsupportedError, match="126 tokens: a multiple of 4"):
        dflash(with_key(bonus, "tokenizer.ggml.mask_token_id", 1), replace(target, vocab_size=126))


# ---- DFlash2 ----


def test_blocks_with_convolutions_and_a_selector(golden: Golden, target: Config) -> None:
    file = golden("dflash2-select.draft")
    draft = dflash(file, target)
    assert draft.selector is not None
    assert (draft.selector.most, draft.selector.rank, draft.most) == (4, 32, 4)
    assert len(draft.convolutions) == draft.n_layers == 2
    for of in (of for around in draft.convolutions for of in around):
        assert (of.taps, of.group, of.base.size) == (3, 32, 2 * 3 * 128)
        assert (of.dynamic.rows, of.dynamic.cols) == (2 * 3 * 4, 128)
    plain = dflash(golden("dflash-d2t.draft"), target)
    assert (plain.selector, plain.convolutions, plain.dynamic_width) == (None, (), 0)
    for changed, what in [
        (without(file, "selector_successor.weight"), "'selector_successor.weight'"),
        (without(file, "blk.1.ffn_conv_base"), "'blk.1.ffn_conv_base'"),
        (with_key(file, "dflash.selector_rank", 16), "'selector_predecessor.weight'"),
        (with_key(file, "dflash.selector_top_k", 33), "33 tokens .* at most 32"),
        (with_key(file, "dflash.conv_kernel_size", 2), "conv_base'"),
        (with_key(file, "dflash.conv_kernel_size", 17), "17 taps"),
        (with_key(file, "dflash.conv_group_size", 48), "groups of 48 of 128"),
        (with_key(file, "dflash.conv_group_size", None), "dflash.conv_group_size"),
    ]:
        with pytest.raises(REFUSALS, match=what):
            dflash(changed, target)
