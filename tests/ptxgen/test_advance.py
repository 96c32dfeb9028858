"""The kernel that ends a step."""

from __future__ import annotations

import numpy as np
import pytest

from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.advance import IDLE, Advance
from urdir.ptxgen.kernels.argmax import INVALID_RANK, Argmax, ranks
from urdir.ptxgen.kernels.sampling import pack_settings
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN


def checked(device, spec, inputs):
    outputs = run_kernel(device, spec, inputs)
    for name, expected in spec.reference(**inputs).items():
        np.testing.assert_array_equal(outputs[name], expected, err_msg=name)
    return outputs


def words(*values):
    return np.array(values, np.uint32)


def ends(*ids, sequences):
    """Settings of sequences that all end at some tokens."""
    return np.tile(pack_settings(end_ids=ids), (sequences, 1))


@pytest.mark.parametrize(
    ("position", "known", "after"),
    [
        (2, 3, (3, 4, [10, 11, 12, 99, 14])),  # the sampled token is appended
        (1, 3, (2, 3, [10, 11, 12, 13, 14])),  # the prompt's own token is kept
        (3, 4, (4, 5, [10, 11, 12, 13, 99])),  # the last place
        (4, 5, (5, 5, [10, 11, 12, 13, 14])),  # no place left
        (5, 5, (5, 5, [10, 11, 12, 13, 14])),  # idle
        (2**32 - 1, 3, (2**32 - 1, 3, [10, 11, 12, 13, 14])),
    ],
)
def test_one_row(position, known, after, device):
    inputs = {
        "sequence": words(0),
        "position": words(position),
        "tokens": np.arange(10, 15, dtype=np.uint32)[None],
        "known": words(known),
        "settings": ends(sequences=1),
        "sampled": words(99),
    }
    outputs = checked(device, Advance(max_len=5), inputs)
    at, count, tokens = after
    assert outputs["position"].tolist() == [at]
    assert outputs["known"].tolist() == [count]
    assert outputs["tokens"].tolist() == [tokens]


def test_rows_of_different_sequences(device):
    inputs = {
        "sequence": words(3, 0, 2**32 - 1, 1),  # an idle row's sequence is not looked at
        "position": words(1, 0, 6, 2),
        "tokens": np.arange(16, dtype=np.uint32).reshape(4, 4),
        "known": words(4, 3, 2, 2),
        "settings": ends(51, 52, sequences=4),  # one is not appended, one is of an idle row
        "sampled": words(50, 51, 52, 53),
    }
    outputs = checked(device, Advance(max_len=4, rows=4, sequences=4), inputs)
    assert outputs["position"].tolist() == [2, 1, 6, 3]
    assert outputs["known"].tolist() == [4, 4, 2, 3]  # 0 and 2 are as they were
    changed = np.argwhere(outputs["tokens"] != inputs["tokens"])
    assert changed.tolist() == [[1, 3], [3, 2]]
    assert outputs["tokens"][1, 3] == 53
    assert outputs["tokens"][3, 2] == 50


@pytest.mark.parametrize("rows", [1, 31, 33, 64])
@pytest.mark.parametrize("sampling", [True, False])
def test_many_rows(rows, sampling, device):
    spec = Advance(max_len=12, rows=rows, sequences=64, sampling=sampling)
    checked(device, spec, spec.make_inputs(np.random.default_rng(rows)))


def test_the_mailbox_gets_a_token_for_every_row_with_work(device):
    """Whether or not the token is kept: at the end of a sequence, in a prompt; not of idle rows."""
    inputs = {
        "sequence": words(3, 0, 2, 1),
        "position": words(1, 0, 6, 3),
        "tokens": np.arange(16, dtype=np.uint32).reshape(4, 4),
        "known": words(4, 4, 2, 2),
        "settings": ends(sequences=4),
        "sampled": words(50, 51, 52, 53),
        "mailbox": np.full((4, 2), 7, np.uint32),
    }
    outputs = checked(device, Advance(max_len=4, rows=4, sequences=4, slots=2), inputs)
    assert outputs["mailbox"].tolist() == [[51, 7], [7, 53], [7, 7], [7, 50]]


def test_the_token_of_the_highest_rank_is_the_sampled_one(device):
    """Of the first in a row of equals; idle rows have one as well, but keep it to themselves."""
    values = np.array([[1, 5, 5, 2], [-3, -3, -4, -9], [0, 0, 0, 7]], np.float32)
    inputs = {
        "sequence": words(1, 0, 2**32 - 1),
        "position": words(2, 1, 4),
        "tokens": np.arange(8, dtype=np.uint32).reshape(2, 4),
        "known": words(2, 3),
        "settings": ends(sequences=2),
        "ranks": ranks(values, [[40, 30, 20, 10], [11, 21, 31, 41], [12, 22, 32, 42]]),
        "mailbox": np.zeros((2, 2), np.uint32),
    }
    outputs = checked(device, Advance(max_len=4, rows=3, sequences=2, slots=2, slices=4), inputs)
    assert outputs["sampled"].tolist() == [20, 11, 42]
    assert outputs["position"].tolist() == [3, 2, 4]
    assert outputs["tokens"].tolist() == [[0, 1, 11, 3], [4, 5, 6, 20]]
    assert outputs["mailbox"].tolist() == [[0, 11], [20, 0]]


@pytest.mark.parametrize("slices", [0, 1, 40])
@pytest.mark.parametrize("count", [0, 1, 16])
def test_a_row_is_idle_after_an_end_id_or_no_token(slices, count, device):
    """The token is posted and appended all the same. Within a prompt nothing ends."""
    chosen = words(70 + max(count - 1, 0), 70, INVALID_TOKEN, 90, INVALID_TOKEN, 70)
    values = np.full((6, slices), -1, np.float32)
    values[:, slices // 2 : slices // 2 + 1] = 2
    names = np.tile(chosen[:, None], (1, slices))
    by_rank = np.where(names == INVALID_TOKEN, INVALID_RANK, ranks(values, names))
    inputs = {
        "sequence": np.arange(6, dtype=np.uint32),
        "position": words(1, 0, 2, 1, 0, 7),
        "tokens": np.zeros((6, 7), np.uint32),
        "known": words(2, 1, 3, 2, 3, 3),
        "settings": ends(*range(70, 70 + count), sequences=6),
        "mailbox": np.zeros((6, 2), np.uint32),
    }
    inputs |= {"ranks": by_rank} if slices else {"sampled": chosen}
    spec = Advance(max_len=7, rows=6, sequences=6, slots=2, slices=slices)
    outputs = checked(device, spec, inputs)
    ended = IDLE if count else 2
    assert outputs["position"].tolist() == [ended, IDLE if count else 1, IDLE, 2, 1, 7]
    assert outputs["known"].tolist() == [3, 2, 4, 3, 3, 3]
    assert outputs["tokens"][[0, 1, 2, 3], [2, 1, 3, 2]].tolist() == chosen[:4].tolist()
    posted = [outputs["mailbox"][row, p % 2] for row, p in enumerate([1, 0, 2, 1, 0])]
    assert posted == chosen[:5].tolist()


@pytest.mark.parametrize("answer_at", [0, 2, 4, 9])
def test_no_end_before_the_least_number_of_tokens(answer_at, device):
    """Rows whose next token has the place 1 to 5: an end from two tokens of the answer on."""
    spec = Advance(max_len=9, rows=5, sequences=5)
    inputs = {
        "sequence": np.arange(5, dtype=np.uint32),
        "position": np.arange(5, dtype=np.uint32),
        "tokens": np.zeros((5, 9), np.uint32),
        "known": np.arange(1, 6, dtype=np.uint32),
        "settings": np.tile(pack_settings(end_ids=[7], min_tokens=2, answer_at=answer_at), (5, 1)),
        "sampled": words(7, 7, 7, 7, INVALID_TOKEN),
    }
    idle = [at == 5 or at - answer_at >= 2 for at in range(1, 6)]
    position = checked(device, spec, inputs)["position"]
    assert position.tolist() == [IDLE if i else at for at, i in zip(range(1, 6), idle, strict=True)]


@pytest.mark.parametrize("slices", [1, 2, 31, 32, 33, 126, 1024])
def test_the_highest_rank_is_found_wherever_it_is(slices, device):
    spec = Advance(max_len=12, rows=4, sequences=9, slices=slices)
    inputs = spec.make_inputs(np.random.default_rng(slices))
    inputs["ranks"][inputs["ranks"] == INVALID_RANK] = ranks(-9, 1)
    for row, at in enumerate((0, slices // 2, slices - 1)):
        inputs["ranks"][row, at] = ranks(9, 3 + row)
    outputs = checked(device, spec, inputs)
    assert outputs["sampled"][:3].tolist() == [3, 4, 5]


@pytest.mark.parametrize("rows", [1, 3])
def test_argmax_and_advance_choose_as_numpy_does(rows, device):
    argmax = Argmax(n=5003, rows=rows)
    logits = argmax.make_inputs(np.random.default_rng(rows))["logits"]
    advance = Advance(max_len=12, rows=rows, sequences=9, slices=argmax.slices)
    inputs = advance.make_inputs(np.random.default_rng(0))
    inputs["ranks"] = run_kernel(device, argmax, {"logits": logits})["ranks"]
    best = logits.max(axis=1)
    expected = np.where(np.isfinite(best), logits.argmax(axis=1), INVALID_TOKEN)
    assert set(np.isfinite(best)) == ({False} if rows == 1 else {False, True})
    assert run_kernel(device, advance, inputs)["sampled"].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        *({"max_len": 0}, {"max_len": 2**31}, {"rows": 0}, {"rows": 1025}, {"sequences": 0}),
        *({"slots": 3}, {"slots": -1}, {"slots": 2, "sampling": False}),
        *({"slices": -1}, {"slices": 1025}, {"slices": 1, "sampling": False}),
    ],
    ids=str,
)
def test_shapes_that_make_no_sense_are_refused(fields):
    with pytest.raises(PtxgenError, match=r"^advance: "):
        Advance(**{"max_len": 10} | fields)
