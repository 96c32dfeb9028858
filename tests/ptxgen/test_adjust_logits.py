"""Bias, penalties and allowed tokens against plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.adjust_logits import AdjustLogits
from urdir.ptxgen.kernels.sampling import SETTINGS, SETTINGS_WORDS, adjust, pack_settings


def inputs_for(spec, logits, words, tokens, *, position, allowed=None):
    """Inputs with the same logits, settings and history in every row; ``allowed`` ids, or all."""
    bits = np.zeros(32 * spec.mask_words, np.uint8)
    bits[list(allowed or ())] = 1
    masks = np.tile(np.packbits(bits, bitorder="little").view(np.uint32), (spec.rows, 1))
    history = np.zeros((spec.sequences, spec.max_len), np.uint32)
    history[:, : len(tokens)] = tokens
    return {
        "logits": np.tile(np.asarray(logits, np.float32), (spec.rows, 1)),
        "raw": np.full((spec.rows, spec.n_vocab), 7, np.float32),
        "settings": np.tile(words, (spec.sequences, 1)),
        "tokens": history,
        "masks": masks,
        "masked": np.full(spec.rows, allowed is not None, np.uint32),
        "sequence": np.arange(spec.rows, dtype=np.uint32) % spec.sequences,
        "position": np.broadcast_to(position, spec.rows).astype(np.uint32),
    }


def adjusted(device, spec, inputs):
    """The logits that the kernel leaves, having checked that numpy's reference leaves the same."""
    outputs = run_kernel(device, spec, inputs)
    for name, expected in spec.reference(**inputs).items():
        np.testing.assert_array_equal(outputs[name], expected, err_msg=name)
    return outputs["logits"]


def plain(logits, tokens, *, repeat=(1.0, 0), presence=0.0, frequency=0.0, bias=(), answer_at=0):
    """The definitions in f64, token by token."""
    values = [float(x) for x in logits]
    for token, added in bias:
        values[token] += added
    penalty, last_n = repeat
    window = tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]
    for token in set(window):
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(tokens[answer_at:]).items():
        values[token] -= count * frequency + presence
    return values


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_reference_follows_the_definitions(data):
    n = data.draw(st.integers(1, 40))
    logits = np.random.default_rng(n).normal(0, 5, n).astype(np.float32)
    tokens = data.draw(st.lists(st.integers(0, n - 1), max_size=30))
    some = st.floats(-2, 2, width=32)
    asked = {
        "repeat": (data.draw(st.floats(0.5, 2, width=32)), data.draw(st.integers(-1, 9))),
        "presence": data.draw(some),
        "frequency": data.draw(some),
        "bias": tuple(data.draw(st.dictionaries(st.integers(0, n - 1), some)).items()),
        "answer_at": data.draw(st.integers(0, 30)),
    }
    words = pack_settings(
        repeat_penalty=asked["repeat"][0],
        repeat_last_n=asked["repeat"][1],
        presence_penalty=asked["presence"],
        frequency_penalty=asked["frequency"],
        logit_bias=dict(asked["bias"]),
        answer_at=asked["answer_at"],
    )
    found = adjust(logits, words, tokens)
    np.testing.assert_allclose(found, plain(logits, tokens, **asked), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("n_vocab", [4096, 4099, 130])
def test_counts_of_a_long_history(n_vocab, device):
    """The penalties of OpenAI look at the answer, the repetition penalty at its window."""
    spec = AdjustLogits(n_vocab, 5000, width=2048)
    rng = np.random.default_rng(n_vocab)
    tokens = (rng.zipf(1.3, 4097) % n_vocab).tolist()
    logits = rng.normal(0, 4, n_vocab)
    words = pack_settings(
        repeat_penalty=1.3,
        repeat_last_n=700,
        presence_penalty=0.25,
        frequency_penalty=0.0625,
        answer_at=1000,
    )
    found = adjusted(device, spec, inputs_for(spec, logits, words, tokens, position=4096))
    wanted = plain(
        np.float32(logits),
        tokens,
        repeat=(float(np.float32(1.3)), 700),
        presence=0.25,
        frequency=0.0625,
        answer_at=1000,
    )
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6, atol=1e-5)
    assert max(Counter(tokens[1000:]).values()) > 100


@pytest.mark.parametrize("last_n", [-1, 0, 1, 3, 1000])
def test_the_repetition_penalty_looks_back_as_far_as_it_is_told(last_n, device):
    spec = AdjustLogits(90, 60, rows=3, sequences=3)
    words = pack_settings(repeat_penalty=2.0, repeat_last_n=last_n)
    position = np.array([0, 20, 59])
    inputs = inputs_for(spec, np.full(90, 8.0), words, np.arange(60), position=position)
    found = adjusted(device, spec, inputs)
    window = 60 if last_n < 0 else last_n
    assert (found == 4.0).sum(axis=1).tolist() == [min(window, p + 1) for p in position]
    assert set(np.unique(found)) <= {4.0, 8.0}


def test_tokens_of_no_vocabulary_are_passed_over(device):
    spec = AdjustLogits(61, 5)
    words = pack_settings(
        repeat_penalty=2.0,
        repeat_last_n=-1,
        frequency_penalty=1.0,
        logit_bias={61: 5.0, 2**32 - 2: 1.0},
        end_ids=[61, 2**32 - 1],
        min_tokens=9,
    )
    logits = np.arange(61)
    inputs = inputs_for(spec, logits, words, [61, 2**32 - 1, 64, 2**31, 8192], position=4)
    np.testing.assert_array_equal(adjusted(device, spec, inputs)[0], logits)


@pytest.mark.parametrize("answer_at", [0, 3, 9])
def test_end_ids_wait_for_the_least_number_of_tokens(answer_at, device):
    """Three end ids, at least four tokens: positions 0 to 8 have 1 to 9 tokens before the next."""
    spec = AdjustLogits(4100, 9, rows=9, width=2048)
    words = pack_settings(end_ids=[5, 4099, 2048], min_tokens=4, answer_at=answer_at)
    inputs = inputs_for(spec, np.ones(4100), words, np.arange(9), position=np.arange(9))
    found = adjusted(device, spec, inputs)
    banned = np.isinf(found)
    generated = np.maximum(np.arange(9) + 1 - answer_at, 0)
    assert banned.sum(axis=1).tolist() == np.where(generated < 4, 3, 0).tolist()
    assert banned[0, [5, 4099, 2048]].all()


@pytest.mark.parametrize("n_vocab", [1, 31, 64, 2051, 4100])
def test_a_mask_decides_alone(n_vocab, device):
    """What it has no bit for is never chosen, and an end id that it allows may come at once."""
    spec = AdjustLogits(n_vocab, 4, width=2048)
    rng = np.random.default_rng(n_vocab)
    allowed = {*rng.integers(0, n_vocab, 9).tolist(), n_vocab - 1}
    words = pack_settings(min_tokens=3, end_ids=[n_vocab - 1], logit_bias={0: 100.0})
    inputs = inputs_for(spec, np.ones(n_vocab), words, [0], position=0, allowed=allowed)
    found = adjusted(device, spec, inputs)
    assert set(np.flatnonzero(np.isfinite(found[0]))) == allowed


def test_rows_that_ask_for_nothing_stay_as_they_are(device):
    spec = AdjustLogits(100, 50, rows=3, sequences=2)
    logits = np.random.default_rng(12).normal(size=100)
    logits[3:5] = np.nan, np.inf
    inputs = inputs_for(
        spec, logits, pack_settings(temperature=1.0), [1] * 50, position=[49, 50, 2**32 - 1]
    )
    inputs["sequence"][:] = 1, 2**32 - 1, 7  # an idle row's sequence is not looked at
    np.testing.assert_array_equal(adjusted(device, spec, inputs), inputs["logits"])


@pytest.mark.parametrize(("width", "n_vocab"), [(2048, 5000), (2048, 5003), (8192, 20_001)])
def test_random_rows(width, n_vocab, device):
    spec = AdjustLogits(n_vocab, 90, rows=7, sequences=9, width=width)
    for seed in range(3):
        adjusted(device, spec, spec.make_inputs(np.random.default_rng(seed)))


def test_settings_are_records_that_lie_apart_by_16_bytes():
    assert SETTINGS.itemsize == 4 * SETTINGS_WORDS
    assert SETTINGS.itemsize % 16 == 0
    words = pack_settings(logit_bias={7: 1.5, 3: -2.0}, end_ids=[9, 8], logprobs=0, seed=2**64 - 1)
    (record,) = words.view(SETTINGS)
    assert record["bias_ids"][:2].tolist() == [7, 3]
    assert record["biases"][:2].tolist() == [1.5, -2.0]
    assert (record["bias_count"], record["end_count"], record["logprobs"]) == (2, 2, 1)
    assert record["seed"] == 2**64 - 1


@pytest.mark.parametrize(
    "many",
    [
        {"end_ids": range(17)},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
        {"logprobs": 21},
    ],
    ids=str,
)
def test_more_than_a_record_holds_is_refused(many):
    with pytest.raises(PtxgenError, match=r"^sampling settings: .* at most"):
        pack_settings(**many)


@pytest.mark.parametrize(
    "fields",
    [
        *({"n_vocab": 0}, {"n_vocab": 2**28 + 1}, {"max_len": 0}, {"rows": 0}, {"rows": 2**16}),
        *({"sequences": 0}, {"width": 1024}),
    ],
    ids=str,
)
def test_shapes_that_make_no_sense_are_refused(fields):
    with pytest.raises(PtxgenError, match=r"^adjust_logits: "):
        AdjustLogits(**{"n_vocab": 10, "max_len": 10} | fields)


@pytest.mark.sanitizer
def test_on_the_emulator_with_its_sanitizer():
    """Counters of one CTA that many threads add to, and logits that others have biased."""
    spec = AdjustLogits(2051, 300, width=2048)
    with Device.open("emulator") as emulator:
        adjusted(emulator, spec, spec.make_inputs(np.random.default_rng(1)))
