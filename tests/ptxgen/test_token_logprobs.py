"""Log-probabilities of tokens against their definition in f64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from urdir.driver.harness import check_kernel, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.sampling import pack_settings
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN
from urdir.ptxgen.kernels.token_logprobs import TokenLogprobs


def inputs_for(spec, logits, wanted, sampled, position=0):
    """Inputs with the same logits in every row; ``wanted`` tokens of each, None: nothing."""
    return {
        "logits": np.broadcast_to(logits, (spec.rows, spec.n_vocab)).astype(np.float32),
        "settings": np.stack([pack_settings(logprobs=count) for count in wanted]),
        "sequence": np.arange(spec.rows, dtype=np.uint32),
        "position": np.broadcast_to(position, spec.rows).astype(np.uint32),
        "sampled": np.broadcast_to(sampled, spec.rows).astype(np.uint32),
        "logprobs": np.full((spec.sequences, spec.slots, 21), 5, np.float32),
        "likely": np.full((spec.sequences, spec.slots, 20), 77, np.uint32),
    }


@pytest.mark.parametrize("n_vocab", [20, 61, 1025, 4096, 4099])
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_the_likeliest_and_the_chosen_one(n_vocab, spread, device):
    spec = TokenLogprobs(n_vocab, 9, rows=4, sequences=4, slots=2)
    logits = np.random.default_rng(n_vocab).normal(0, spread, n_vocab).astype(np.float32)
    wanted, chosen = [None, 0, 3, 20], [1, n_vocab - 1, 7, 0]
    inputs = inputs_for(spec, logits, wanted, chosen, position=3)
    found = run_kernel(device, spec, inputs)
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact)
    order = np.lexsort((np.arange(n_vocab), -exact))
    for row, count in enumerate(wanted):
        values, names = found["logprobs"][row], found["likely"][row]
        assert (values[0] == 5).all()
        assert (names[0] == 77).all()
        if count is None:
            assert (values == 5).all()
            continue
        assert values[1, 0] == pytest.approx(exact[chosen[row]], abs=1e-5)
        assert names[1, :count].tolist() == order[:count].tolist()
        np.testing.assert_allclose(values[1, 1 : 1 + count], exact[order[:count]], atol=1e-5)
        assert (values[1, 1 + count :] == 5).all()
        assert (names[1, count:] == 77).all()


def test_equals_go_by_index_and_infinities_come_last(device):
    spec = TokenLogprobs(3000, 4)
    logits = np.full(3000, -np.inf, np.float32)
    logits[[2999, 5, 1029, 2053]] = 1.0  # three of them are one thread's
    found = run_kernel(device, spec, inputs_for(spec, logits, [7], 5))
    assert found["likely"][0, 0, :7].tolist() == [5, 1029, 2053, 2999, 0, 1, 2]
    np.testing.assert_allclose(found["logprobs"][0, 0, :5], np.log(0.25), atol=1e-6)
    assert np.isneginf(found["logprobs"][0, 0, 5:8]).all()


def test_tokens_that_one_thread_holds(device):
    """All of the likeliest are looked for by the same thread."""
    spec = TokenLogprobs(1024 * 4 * 6, 4)
    logits = np.zeros(spec.n_vocab, np.float32)
    mine = (np.arange(24) // 4 * 4096 + np.arange(24) % 4 + 40)[:22]
    logits[mine] = np.random.default_rng(2).permutation(22) + 3
    inputs = inputs_for(spec, logits, [20], 40)
    found = run_kernel(device, spec, inputs)
    assert found["likely"][0, 0].tolist() == mine[np.argsort(-logits[mine])][:20].tolist()


def test_more_tokens_than_the_vocabulary_has(device):
    spec = TokenLogprobs(3, 4)
    found = run_kernel(device, spec, inputs_for(spec, [0.0, 2.0, 1.0], [20], 1))
    assert found["likely"][0, 0, :4].tolist() == [1, 2, 0, 77]


def test_idle_rows_and_rows_without_a_choice_report_nothing(device):
    spec = TokenLogprobs(50, 8, rows=3, sequences=3)
    inputs = inputs_for(spec, np.nan, [5] * 3, [3, INVALID_TOKEN, 50], position=[8, 2, 3])
    inputs["sequence"][0] = 2**32 - 1  # not looked at
    found = run_kernel(device, spec, inputs)
    assert (found["logprobs"] == 5).all()
    assert (found["likely"] == 77).all()


@pytest.mark.parametrize("n_vocab", [500, 4097, 8192])
def test_random_rows(n_vocab, device):
    spec = replace(TokenLogprobs.examples()["odd"], n_vocab=n_vocab)
    for seed in range(3):
        check_kernel(device, spec, seed, sanitize=False)


@pytest.mark.parametrize(
    "fields",
    [
        *({"n_vocab": 0}, {"n_vocab": 2**28 + 1}, {"max_len": 0}, {"rows": 0}, {"rows": 2**16}),
        *({"sequences": 0}, {"slots": 0}, {"slots": 3}),
    ],
    ids=str,
)
def test_shapes_that_make_no_sense_are_refused(fields):
    with pytest.raises(PtxgenError, match=r"^token_logprobs: "):
        TokenLogprobs(**{"n_vocab": 10, "max_len": 10} | fields)
