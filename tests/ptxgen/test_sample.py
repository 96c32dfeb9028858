"""The sampling kernel against numpy, draw for draw and as a distribution."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.sample import Sample
from urdir.ptxgen.kernels.sampling import (
    INVALID_TOKEN,
    SETTINGS_WORDS,
    distribution,
    pack_settings,
    random_bits,
    random_settings,
)
from urdir.ptxgen.render.jinja import environment
from urdir.ptxgen.spec import Access, KernelSpec, LaunchShape, Param

OFF = {"temperature": 1.0}  # every filter


def inputs_for(spec, logits, settings, *, seed=None, nonce=0, position=0):
    """Inputs with the same logits, settings... in every row, or one for each."""
    each = np.arange(spec.rows, dtype=np.uint32)
    words = np.array(np.broadcast_to(settings, (spec.sequences, SETTINGS_WORDS)), np.uint32)
    if seed is not None:
        of_all = [np.broadcast_to(np.array(x, np.uint64), spec.sequences) for x in (seed, nonce)]
        words[:, 8:12] = np.ascontiguousarray(np.stack(of_all, axis=1)).view(np.uint32)
    return {
        "logits": np.broadcast_to(logits, (spec.rows, spec.n_vocab)).astype(np.float32),
        "settings": words,
        "sequence": each % spec.sequences,
        "position": np.broadcast_to(position, spec.rows).astype(np.uint32),
    }


def both(device, spec, inputs):
    """What the kernel samples, having checked that numpy samples the same."""
    sampled = run_kernel(device, spec, inputs)["sampled"]
    np.testing.assert_array_equal(sampled, spec.reference(**inputs)["sampled"])
    return sampled.tolist()


# ---- random numbers ----

RANDOM = """
// random_word: bits[i] = the first word of Philox(key[i], low[i] + (high[i] << 64))
// grid: one CTA
{% import "_sample_philox.j2" as philox %}
.reg .b32 %i; .reg .b64 %at, %a, %b, %c, %d;
mov.u32 %i, %tid.x;
mul.wide.u32 %at, %i, 8;
{% for name in ("key", "low", "high", "bits") %}
add.u64 %{{ name }}, %{{ name }}, %at;
{% endfor %}
ld.global.u64 %a, [%key];
ld.global.u64 %b, [%low];
ld.global.u64 %c, [%high];
{{ philox.first_word("%d", "%a", "%b", "%c") }}
st.global.u64 [%bits], %d;
ret;
"""


@dataclass(frozen=True)
class RandomWord(KernelSpec):
    """The random number of the sampler, by itself."""

    n: int

    name = "random_word"
    template = ("urdir_random_template", "random.ptx.j2")

    @property
    def params(self):
        return (
            *(Param(name, "u64", ("n",), Access.IN) for name in ("key", "low", "high")),
            Param("bits", "u64", ("n",), Access.OUT),
        )

    @property
    def launch_shape(self):
        return LaunchShape((1, 1, 1), (self.n, 1, 1))


def test_random_words_are_numpys(device, tmp_path, monkeypatch):
    (tmp_path / "urdir_random_template").mkdir()
    (tmp_path / "urdir_random_template" / "__init__.py").write_text("")
    (tmp_path / "urdir_random_template" / "random.ptx.j2").write_text(RANDOM.lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(3)
    low = rng.integers(0, 2**32, 256, np.uint64)
    low[:4] = 0, 1, 2**32 - 1, 2**32
    inputs = {
        "key": rng.integers(0, 2**64, 256, np.uint64),
        "low": low,
        "high": rng.integers(0, 2**32, 256, np.uint64),
    }
    inputs["key"][:3] = 0, 1, 2**64 - 1
    inputs["high"][::2] = 0
    bits = run_kernel(device, RandomWord(256), inputs)["bits"]
    environment.cache_clear()
    sys.modules.pop("urdir_random_template", None)
    words = (inputs[name].tolist() for name in ("key", "high", "low"))
    assert bits.tolist() == [random_bits(*word) for word in zip(*words, strict=True)]


def test_an_even_distribution_shows_the_bits_of_the_draw(device):
    spec = Sample(n_vocab=2**12, max_len=64, rows=16, sequences=16)
    position = np.arange(16) * 4
    seed = np.random.default_rng(4).integers(0, 2**64, 16, np.uint64)
    nonce = np.arange(16, dtype=np.uint64) << np.uint64(60) * (np.arange(16) % 3 > 0)
    inputs = inputs_for(spec, 0.0, pack_settings(**OFF), seed=seed, nonce=nonce, position=position)
    expected = [
        random_bits(int(seed[s]), int(nonce[s]), int(position[s]) + 1) >> 52 for s in range(16)
    ]
    assert both(device, spec, inputs) == expected


# ---- against numpy ----


@pytest.mark.turns(4)
@pytest.mark.slow
@pytest.mark.parametrize(("n_vocab", "launches"), [(2048, 3), (509, 3), (40, 3)])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_it_draws_the_same_as_numpy(n_vocab, launches, spread, device):
    spec = Sample(n_vocab=n_vocab, max_len=70, rows=32, sequences=32)
    different = 0
    for seed in range(launches):
        rng = np.random.default_rng(seed)
        settings = np.stack([random_settings(rng) for _ in range(32)])
        inputs = spec.make_inputs(rng) | {"settings": settings}
        inputs["logits"] *= np.float32(spread / 3.0)
        sampled = run_kernel(device, spec, inputs)["sampled"]
        different += np.count_nonzero(sampled != spec.reference(**inputs)["sampled"])
    assert different <= 0.001 * spec.rows * launches  # none, unless a sum's rounding decided


@pytest.mark.turns(4, which=(1, 2))  # all filters, and few candidates
@pytest.mark.slow
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 9},
        {"temperature": 0.7, "top_p": 0.6},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(filters, device):
    """Chi-square over 1,024 positions, at a significance of about 1e-4."""
    spec = Sample(n_vocab=30, max_len=256, rows=256)
    logits = np.random.default_rng(5).normal(0.0, 1.5, 30).astype(np.float32)
    settings, draws = pack_settings(**filters), 1024
    counts = np.zeros(30)
    for seed in range(draws // spec.rows):
        inputs = inputs_for(spec, logits, settings, seed=seed, position=np.arange(256))
        sampled = run_kernel(device, spec, inputs)["sampled"]
        counts += np.bincount(sampled, minlength=30)
    ids, probabilities = distribution(logits, settings)
    assert counts[ids].sum() == draws
    expected = probabilities * draws
    rare = expected < 5.0
    observed = np.append(counts[ids][~rare], counts[ids][rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if not rare.any():
        observed, expected = observed[:-1], expected[:-1]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    # Wilson & Hilferty 1931: a cube root of chi-square is nearly normal
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 3.7


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 700},
        {"top_k": 5000},
        {"top_p": 0.02},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"top_k": 6000, "top_p": 0.5},
        {"min_p": 0.9},
        {"min_p": 1.0},
        {"temperature": 30.0, "top_k": 3000},
        {"temperature": 0.001},
        {"temperature": 1e-40},
    ],
    ids=str,
)
def test_flat_distributions_beyond_the_head(filters, device):
    spec = Sample(n_vocab=8192, max_len=8, rows=4, sequences=4)
    logits = np.random.default_rng(6).normal(0.0, 0.3, (4, 8192))
    inputs = inputs_for(spec, logits, pack_settings(**OFF | filters), seed=[1, 2, 3, 2**64 - 1])
    both(device, spec, inputs)


def test_likely_tokens_that_one_thread_would_hold(device):
    """More of the likely tokens lie with few threads than the head of the distribution holds."""
    spec = Sample(n_vocab=16384, max_len=8, rows=3, sequences=3)
    rng = np.random.default_rng(8)
    logits = rng.normal(0.0, 0.5, (3, 16384))
    logits += np.where(np.arange(16384) % 4096 < 4 * 300, 4.0, 0.0)
    settings = np.stack(
        [
            pack_settings(**OFF),
            pack_settings(temperature=0.8, top_k=40, top_p=0.9),
            pack_settings(temperature=0.0),
        ]
    )
    assert both(device, spec, inputs_for(spec, logits, settings))[2] == logits[2].argmax()


# ---- single rules ----


@pytest.mark.turns(2)
@pytest.mark.parametrize("n_vocab", [10, 1024, 1500, 4100])
def test_ties_go_to_the_lowest_index(n_vocab, device):
    spec = Sample(n_vocab=n_vocab, max_len=40, rows=40)
    draw = pack_settings(temperature=1.0, top_k=3)
    position = np.arange(40)
    logits = np.where(np.arange(n_vocab) % 2, 0.0, -0.0)  # the two zeros are equal
    sampled = both(device, spec, inputs_for(spec, logits, draw, position=position))
    assert set(sampled) == {0, 1, 2}
    half = pack_settings(temperature=1.0, top_k=8, top_p=0.5)  # 4 of 8 reach it exactly
    sampled = both(device, spec, inputs_for(spec, logits, half, position=position))
    assert set(sampled) == {0, 1, 2, 3}
    greedy = pack_settings(temperature=0.0)
    assert set(both(device, spec, inputs_for(spec, logits, greedy, position=position))) == {0}


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, OFF], ids=["greedy", "draw"])
def test_logits_that_are_no_numbers(filters, device):
    inf, nan = np.inf, np.nan
    rows = np.array(
        [
            [nan, 1.0, nan, 2.0, -inf, -50.0],
            [-inf, -inf, -inf, -inf, -inf, -inf],
            [nan, nan, nan, nan, nan, nan],
            [0.0, -1.0, inf, 1.0, inf, 2.0],
            [3e38, -3e38, 1.0, -inf, -inf, 3e38],
            [-inf, -inf, 1e-44, 0.0, -1e-44, -inf],
        ],
        np.float32,
    )
    spec = Sample(n_vocab=6, max_len=4, rows=6, sequences=6)
    for seed in range(4):
        sampled = both(device, spec, inputs_for(spec, rows, pack_settings(**filters), seed=seed))
        assert sampled[:4] == [INVALID_TOKEN] * 4
        assert sampled[4] in (0, 5)
        assert sampled[5] in (2, 3, 4)


@pytest.mark.parametrize("n_vocab", [5000, 5001])
def test_one_nan_anywhere_is_found(n_vocab, device):
    spec = Sample(n_vocab=n_vocab, max_len=8, rows=6, sequences=6)
    rng = np.random.default_rng(13)
    logits = rng.normal(size=(6, n_vocab)).astype(np.float32)
    for row, at in enumerate((0, n_vocab - 1, *rng.integers(0, n_vocab, 3).tolist())):
        logits[row, at] = rng.choice([np.nan, -np.nan, np.inf])
    settings = np.stack([random_settings(rng) for _ in range(6)])
    sampled = both(device, spec, inputs_for(spec, logits, settings))
    assert sampled[:5] == [INVALID_TOKEN] * 5
    assert sampled[5] < n_vocab


@pytest.mark.slow
def test_a_row_is_the_same_alone_and_in_a_batch(device):
    spec = Sample(n_vocab=1200, max_len=50, rows=6, sequences=6)
    inputs = spec.make_inputs(np.random.default_rng(11))
    sampled = run_kernel(device, spec, inputs)["sampled"]
    alone = replace(spec, rows=1)
    for row in range(6):
        single = inputs | {
            name: inputs[name][row : row + 1] for name in ("logits", "sequence", "position")
        }
        assert run_kernel(device, alone, single)["sampled"][0] == sampled[row]


def test_idle_rows_read_nothing(device):
    spec = Sample(n_vocab=100, max_len=50, rows=3, sequences=2)
    logits = np.random.default_rng(12).normal(size=100)
    inputs = inputs_for(spec, logits, pack_settings(**OFF), position=[49, 50, 2**32 - 1])
    inputs["sequence"][:] = 1, 2**32 - 1, 7  # no sequences: reading them would fault
    assert both(device, spec, inputs)[1:] == [0, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"n_vocab": 0},
        {"n_vocab": 2**28 + 1},
        {"max_len": 0},
        {"rows": 0},
        {"rows": 2**16},
        {"sequences": 0},
    ],
    ids=str,
)
def test_shapes_that_make_no_sense_are_refused(fields):
    with pytest.raises(PtxgenError, match=r"^sample: "):
        Sample(**{"n_vocab": 10, "max_len": 10} | fields)
