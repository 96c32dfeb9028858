"""Samplers against distributions computed in another way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.sampling_table import GUIDE, guide_with_table
from urdir.model.engine.batch import Output
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling import distribution, sample, uniform
from urdir.model.engine.sampling_settings import (
    DEFAULTS,
    GREEDY,
    OPENAI,
    SETTINGS,
    SamplingSettings,
)
from urdir.model.errors import ModelError, SettingsError
from urdir.model.serve.interface import Defaults
from urdir.ptxgen.kernels.sampling import RECORD, SETTINGS_WORDS
from urdir.ptxgen.kernels.sampling import SETTINGS as DEVICE_SETTINGS

OFF = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def random_logits(n: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 2.0, n).astype(np.float32)


def reference(
    logits: Sequence[float], options: SamplingSettings, previous: Sequence[int] = ()
) -> dict[int, float]:
    """The distribution by plain Python, filter after filter: token id -> probability.

    Settings and penalised logits are f32, as on the device.
    """
    values = {i: float(x) for i, x in enumerate(logits)}
    window = previous if options.repeat_last_n < 0 else list(previous)[len(previous) - min(
        options.repeat_last_n, len(previous)):]  # fmt: skip
    for token in set(window):
        value, penalty = np.float32(values[token]), np.float32(options.repeat_penalty)
        values[token] = float(value * penalty if value <= 0 else value / penalty)

    def probabilities(of: dict[int, float]) -> dict[int, float]:
        top = max(of.values())
        weights = {i: math.exp(x - top) for i, x in of.items()}
        total = math.fsum(weights.values())
        return {i: w / total for i, w in weights.items()}

    ranked = sorted(values, key=lambda i: (-values[i], i))
    ranked = ranked[: options.top_k or None]
    if options.top_p < 1.0:
        share, total = probabilities({i: values[i] for i in ranked}), 0.0
        for count, token in enumerate(ranked, 1):
            total += share[token]
            if total >= np.float32(options.top_p):
                ranked = ranked[:count]
                break
    share = probabilities({i: values[i] for i in ranked})
    ranked = [i for i in ranked if share[i] >= options.min_p * share[ranked[0]] * (1 - 1e-6)]
    return probabilities({i: values[i] / float(np.float32(options.temperature)) for i in ranked})


CASES = [
    OFF,
    replace(OFF, temperature=0.3),
    replace(OFF, temperature=2.5),
    replace(OFF, top_k=1),
    replace(OFF, top_k=7),
    replace(OFF, top_k=1000),
    replace(OFF, top_p=0.5),
    replace(OFF, top_p=0.0),
    replace(OFF, min_p=0.1),
    replace(OFF, min_p=1.0),
    replace(OFF, repeat_penalty=1.5, repeat_last_n=3),
    replace(OFF, repeat_penalty=0.5, repeat_last_n=-1),
    SamplingSettings(),
    SamplingSettings(temperature=1.7, top_k=20, top_p=0.9, min_p=0.02, repeat_penalty=1.2),
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_distribution(options: SamplingSettings) -> None:
    for n in (1, 5, 61, 500):
        logits = random_logits(n)
        previous = [0, n - 1, n // 2, n // 3, n // 3]
        ids, probabilities = distribution(logits, options, previous)
        expected = reference(logits.tolist(), options, previous)
        assert set(ids.tolist()) == set(expected)
        for token, probability in zip(ids.tolist(), probabilities, strict=True):
            assert probability == pytest.approx(expected[token], rel=1e-9)
        assert sorted(probabilities, reverse=True) == list(probabilities)


@pytest.mark.turns(3, which=1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [OFF, SamplingSettings(), replace(OFF, top_k=9)], ids=str)
def test_draws_follow_the_distribution(options: SamplingSettings) -> None:
    """Chi-square over 8,000 positions, at a significance of about 1e-4."""
    logits, draws = random_logits(30, seed=3), 8_000
    ids, probabilities = distribution(logits, options)
    seeded = replace(options, seed=12345)
    counts = Counter(sample(logits, seeded, position) for position in range(draws))
    assert counts.keys() <= set(ids.tolist())
    expected = probabilities * draws
    common = expected >= 5.0
    observed = np.array([counts[token] for token in ids.tolist()])
    groups = [(o, e) for o, e in zip(observed[common], expected[common], strict=True)]
    if not common.all():
        groups.append((observed[~common].sum(), expected[~common].sum()))
    statistic = sum((o - e) ** 2 / e for o, e in groups)
    freedom = len(groups) - 1
    # Wilson & Hilferty 1931: a cube root of chi-square is nearly normal
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(
        2 / (9 * freedom)
    )
    assert normal < 3.7


def test_random_numbers_are_uniform_and_reproducible() -> None:
    values = np.array([uniform(1, position) for position in range(20_000)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts, _ = np.histogram(values, bins=50, range=(0.0, 1.0))
    assert ((counts - 400.0) ** 2 / 400.0).sum() < 95.0  # chi-square, 49 degrees, p = 1e-4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert len(np.unique(values)) == len(values)
    assert uniform(1, 77) == values[77]  # whatever was drawn in between
    assert uniform(2, 77) != values[77]
    assert uniform(2**64 - 1, 0) != uniform(0, 0)
    assert uniform(1, 77, nonce=0) == values[77]
    assert len({uniform(1, 77, nonce) for nonce in range(100)}) == 100


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = random_logits(1000)
    options = SamplingSettings(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=9)
    forward = [sample(logits, options, position) for position in range(50)]
    backward = [sample(logits, options, position) for position in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != [sample(logits, replace(options, seed=10), p) for p in range(50)]


def test_greedy_takes_the_lowest_index_of_equals() -> None:
    logits = np.array([0.0, 3.0, 3.0, -np.inf, 3.0], np.float32)
    assert GREEDY.is_greedy
    assert sample(logits, GREEDY, 0) == 1
    ids, probabilities = distribution(logits, GREEDY)
    assert (ids.tolist(), probabilities.tolist()) == ([1], [1.0])


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_index() -> None:
    ids, _ = distribution(np.zeros(10, np.float32), replace(OFF, top_k=3))
    assert ids.tolist() == [0, 1, 2]


def test_requests_of_one_seed_draw_apart_by_their_nonce() -> None:
    logits = random_logits(1000)
    seeded = OFF.with_seed()
    draws = [[sample(logits, replace(seeded, nonce=n), p) for p in range(20)] for n in range(3)]
    assert draws[0] == [sample(logits, seeded, p) for p in range(20)]
    assert draws[0] != draws[1] != draws[2] != draws[0]


def test_settings_as_the_device_reads_them() -> None:
    settings = SamplingSettings(
        0.7, 40, 0.9, 0.05, 1.1, -1, seed=3, nonce=2**63, logit_bias=((7, 1.5),), logprobs=2
    )
    words = settings.words(answer_at=9, end_ids={5, 3})
    assert (words.shape, words.dtype) == ((SETTINGS_WORDS,), np.uint32)
    (record,) = words.view(DEVICE_SETTINGS)
    assert record["temperature"] == np.float32(0.7)
    assert record["top_k"] == 40
    assert record["top_p"] == np.float32(0.9)
    assert record["log_min_p"] == np.float32(math.log(0.05))
    assert record["repeat_penalty"] == np.float32(1.1)
    assert record["repeat_last_n"] == 2**32 - 1
    assert (record["seed"], record["nonce"], record["answer_at"]) == (3, 2**63, 9)
    assert (record["end_count"], record["end_ids"][:2].tolist()) == (2, [3, 5])
    assert (record["bias_count"], record["bias_ids"][0], record["biases"][0]) == (1, 7, 1.5)
    assert record["logprobs"] == 3
    most = SamplingSettings(100, 2**31, 1.0, 0.0, 100, 2**31, 2**64 - 1)
    (extreme,) = most.words().view(DEVICE_SETTINGS)
    assert extreme["temperature"] == extreme["repeat_penalty"] == 100
    assert extreme["top_k"] == extreme["repeat_last_n"] == 2**31
    assert extreme["log_min_p"] == -np.inf
    assert extreme["seed"] == 2**64 - 1


def test_answers_with_the_same_settings_have_words_of_their_own() -> None:
    """Whatever the others have that differs from answer to answer."""
    settings = SamplingSettings(0.7, seed=3, logit_bias=((7, 1.5),))
    first = settings.words(answer_at=9, end_ids={5, 3})
    expected = first.copy()
    second = replace(settings, seed=4).words(answer_at=11)
    first[:] = 0
    assert settings.words(answer_at=9, end_ids={5, 3}).tolist() == expected.tolist()
    (record,) = second.view(DEVICE_SETTINGS)
    assert (record["seed"], record["answer_at"], record["end_count"]) == (4, 11, 0)
    assert not record["end_ids"].any()
    assert (record["temperature"], record["biases"][0]) == (np.float32(0.7), 1.5)


def test_without_a_seed_every_answer_draws_a_new_one() -> None:
    settings = SamplingSettings(top_k=7)
    drawn = [settings.with_seed() for _ in range(3)]
    assert len({each.seed for each in drawn}) == 3
    assert all(replace(each, seed=None) == settings for each in drawn)
    assert all(each.with_seed() is each for each in drawn)
    seeds = {int(settings.words().view(DEVICE_SETTINGS)["seed"][0]) for _ in range(3)}
    assert len(seeds) == 3
    requests = [Request(prompt=(1,), settings=settings) for _ in range(3)]
    assert len({request.settings.seed for request in requests}) == 3
    given = replace(settings, seed=0)
    assert Request(prompt=(1,), settings=given).settings == given


def test_a_penalty_makes_greedy_move_on() -> None:
    logits = np.array([2.0, 1.9, -5.0], np.float32)
    options = SamplingSettings(temperature=0.0, repeat_penalty=1.3, repeat_last_n=2)
    assert not options.is_greedy
    assert sample(logits, options, 3, [0, 0, 0]) == 1
    assert sample(logits, options, 3, [0, 1, 1]) == 0  # out of the window
    assert sample(logits, options, 0) == 0
    assert logits.tolist() == [2.0, np.float32(1.9), -5.0]  # unchanged


def test_penalties_biases_and_masks_change_what_greedy_takes() -> None:
    logits = np.array([2.0, 1.5, 1.0, -3.0], np.float32)
    greedy = SamplingSettings(temperature=0.0)
    generated = [0, 0, 1]
    frequent = replace(greedy, frequency_penalty=0.6)
    present = replace(greedy, presence_penalty=1.2)
    for options, answer_at, token in (
        (frequent, 0, 2),  # 0.8, 0.9, 1.0
        (frequent, 1, 0),  # 1.4, 0.9, 1.0
        (present, 0, 2),  # 0.8, 0.3, 1.0
        (present, 3, 0),  # the prompt does not count
        (replace(greedy, logit_bias=((3, 5.5), (0, -1.0))), 0, 3),
    ):
        assert not options.is_greedy
        assert sample(logits, options, 3, generated, answer_at=answer_at) == token
    patient = replace(greedy, min_tokens=3)
    ends = frozenset({0, 2})
    assert sample(logits, patient, 3, generated, answer_at=1, end_ids=ends) == 1
    assert sample(logits, patient, 3, generated, answer_at=0, end_ids=ends) == 0
    mask = np.array([0b1100], np.uint32)
    assert sample(logits, patient, 3, generated, answer_at=1, end_ids=ends, mask=mask) == 2
    with pytest.raises(ModelError, match="no token is allowed"):
        sample(logits, greedy, 3, mask=np.zeros(1, np.uint32))


def test_the_output_of_a_step_serves_all_of_its_sequences() -> None:
    greedy = SamplingSettings(temperature=0.0)
    reports = replace(greedy, logprobs=0)
    assert Output.of() is Output.of(greedy, greedy) is Output.GREEDY
    assert Output.of(greedy, masked=True) is Output.SAMPLE
    assert Output.of(greedy, SamplingSettings()) is Output.SAMPLE
    assert Output.of(greedy, reports, SamplingSettings()) is Output.LOGPROBS


def test_tokens_ruled_out_are_never_drawn() -> None:
    logits = np.full(100, -np.inf, np.float32)
    logits[[17, 80]] = 0.0
    assert {sample(logits, OFF, position) for position in range(200)} == {17, 80}


@settings(max_examples=100, deadline=None)
@given(
    logits=arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e4, 1e4, width=32)),
    temperature=st.floats(0.01, 100.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_any_setting_leaves_a_distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    options = SamplingSettings(temperature, top_k, top_p, min_p)
    ids, probabilities = distribution(logits, options)
    assert ids[0] == np.argmax(logits)
    assert probabilities.sum() == pytest.approx(1.0)
    assert sample(logits, options, 5) in ids


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_distribution(value: float) -> None:
    with pytest.raises(ModelError, match="forward pass went wrong"):
        sample(np.full(5, value, np.float32), SamplingSettings(), 0)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("temperature", math.nan, "temperature is nan"),
        ("temperature", math.inf, "temperature is inf"),
        ("temperature", -1.0, "temperature is -1.0"),
        ("temperature", 100.5, "temperature is 100.5"),
        ("temperature", "warm", "temperature is 'warm'"),
        ("temperature", None, "temperature is None"),
        ("temperature", True, "temperature is True"),
        ("top_k", 1.5, "top_k is 1.5"),
        ("top_k", 2**31 + 1, "top_k is 2147483649"),
        ("top_k", -1, "top_k is -1"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("top_p", 2, "top_p is 2"),
        ("top_p", math.nan, "top_p is nan"),
        ("min_p", -0.1, "min_p is -0.1"),
        ("repeat_penalty", 0.0, "repeat_penalty is 0.0"),
        ("repeat_penalty", 1e-300, "repeat_penalty is 1e-300"),
        ("repeat_penalty", 101, "repeat_penalty is 101"),
        ("presence_penalty", 101.0, "presence_penalty is 101.0"),
        ("frequency_penalty", math.nan, "frequency_penalty is nan"),
        ("nonce", -1, "nonce is -1"),
        ("logit_bias", ((1, 100.5),), r"logit_bias is \(\(1, 100.5\),\)"),
        ("logit_bias", ((1, math.nan),), r"logit_bias is \(\(1, nan\),\)"),
        ("logit_bias", ((-1, 1.0),), r"logit_bias is \(\(-1, 1.0\),\)"),
        ("logit_bias", ((4, 1.0), (4, 2.0)), r"logit_bias is \(\(4, 1.0\), \(4, 2.0\)\)"),
        ("logit_bias", {4: 1.0}, r"logit_bias is {4: 1.0}"),
        ("logit_bias", ((4, 1.0, 2),), r"logit_bias is \(\(4, 1.0, 2\),\)"),
        ("logit_bias", ((1.5, 1.0),), r"logit_bias is \(\(1.5, 1.0\),\)"),
        ("logit_bias", (4, 5), r"logit_bias is \(4, 5\)"),
        ("min_tokens", -1, "min_tokens is -1"),
        ("logprobs", 21, "logprobs is 21"),
        ("logprobs", -1, "logprobs is -1"),
        ("repeat_last_n", -2, "repeat_last_n is -2"),
        ("seed", -1, "seed is -1"),
        ("seed", 1.0, "seed is 1.0"),
        ("nonce", None, "nonce is None"),
        ("seed", 2**64, f"seed is {2**64}"),
    ],
)
def test_settings_out_of_range_name_the_flag(field: str, value: float, flag: str) -> None:
    with pytest.raises(SettingsError, match=f"^{flag}: expected "):
        SamplingSettings(**{field: value})  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    numbers: Any = {"temperature": np.float32(0.5), "top_k": np.int64(7), "seed": np.uint64(3)}
    settings = SamplingSettings(**numbers)
    assert settings == SamplingSettings(temperature=0.5, top_k=7, seed=3)
    assert settings.words().tolist() == replace(settings, seed=3).words().tolist()


def test_the_defaults_are_llama_cpp_s_for_all_and_openai_s_for_the_server() -> None:
    drawn = Request(prompt=(1,)).settings
    assert replace(drawn, seed=None) == SamplingSettings() == DEFAULTS
    assert (DEFAULTS.temperature, DEFAULTS.top_k) == (0.8, 40)
    assert (DEFAULTS.top_p, DEFAULTS.min_p, DEFAULTS.repeat_last_n) == (0.95, 0.05, 64)
    assert Defaults().settings == OPENAI
    assert (OPENAI.temperature, OPENAI.top_k, OPENAI.top_p, OPENAI.min_p) == (1.0, 0, 1.0, 0.0)


def test_the_device_has_every_setting() -> None:
    assert {part.setting for part in RECORD} == SETTINGS.keys() | {
        *("answer_at", "end_ids"),  # of a request
        "reserved",
    }


def test_the_readme_has_the_table() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert guide_with_table(text) == text, "run tests/sampling_table.py"


def test_every_number_has_bounds_that_its_default_keeps() -> None:
    numbers = {name: of.bounds for name, of in SETTINGS.items() if of.bounds is not None}
    assert SETTINGS.keys() - numbers.keys() == {"logit_bias"}
    for name, bounds in numbers.items():
        for value in (bounds.low, bounds.high):
            SamplingSettings(**{name: value})  # type: ignore[arg-type]
        for value in (bounds.low - 1, bounds.high + 1):
            with pytest.raises(SettingsError, match=f"^{name} is .*: expected "):
                SamplingSettings(**{name: value})  # type: ignore[arg-type]
