"""Kernels with states: prompts against single tokens, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from urdir.driver import Device, check_kernel, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.gated_recurrence import GatedRecurrence
from urdir.ptxgen.kernels.recurrent.heads import HeadsRule
from urdir.ptxgen.kernels.recurrent.prefill_conv import PrefillConv
from urdir.ptxgen.kernels.recurrent.prefill_scan import PrefillScan
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan

IDLE = 0xFFFFFFFF
TOKENS = 29
BY_CHANNEL = HeadsRule(4, 2, 36, 20, delta=True, eps=1e-6, order="apart", channels=True)
PROMPT = (32, 2, 64, 1)
KERNELS = {
    "conv": PrefillConv(
        32, 2, 64, 1, channels=44, taps=4, bias=True, activation=Activation("silu")
    ),
    "gated conv": PrefillConv(32, 2, 64, 1, channels=44, taps=3, gated=True),
    "delta rule": GatedRecurrence(*PROMPT, HeadsRule(4, 2, 32, 20, delta=True, eps=1e-6)),
    "delta rule by channel": GatedRecurrence(*PROMPT, BY_CHANNEL),
    "delta rule with a floor": GatedRecurrence(*PROMPT, replace(BY_CHANNEL, floor=-5.0)),
    "scan": GatedRecurrence(*PROMPT, HeadsRule(4, 2, 16, 20, delta=False, order="vkq")),
    "selective scan": PrefillScan(32, 2, 64, 1, 20, 16),
}


def of_single_rows(spec: RecurrentRows) -> RecurrentRows:
    """The kernel of one row that does what ``spec`` does."""
    if isinstance(spec, PrefillScan):
        return SelectiveScan(1, spec.sequences, spec.max_len, 0, spec.channels, spec.size)
    if isinstance(spec, PrefillConv):
        shape = (1, spec.sequences, spec.max_len, 0, spec.channels, spec.taps)
        return CausalConv(*shape, spec.bias, spec.activation, spec.gated)
    return replace(spec, rows=1, segments=0)


def steps(device: Device, spec: RecurrentRows, inputs: dict[str, Any], counts: list[int]) -> Any:
    """The results of all tokens of sequence 1, so many a launch, and the state after them."""
    by_row = {p.name for p in spec.params if p.shape[:1] == ("rows",)}
    state = next(p.name for p in spec.params if p.shape[:1] == ("sequences",))
    given, results, start = dict(inputs), [], 0
    for count in counts:
        rows = spec.rows if spec.segments else 1
        for name in by_row & inputs.keys():
            part = np.zeros((rows, *inputs[name].shape[1:]), inputs[name].dtype)
            part[:count] = inputs[name][start : start + count]
            given[name] = part
        given["sequence"] = np.full(rows, 1, np.uint32)
        given["position"] = np.full(rows, IDLE, np.uint32)
        given["position"][:count] = np.arange(start, start + count)
        if spec.segments:
            given["segment"] = np.array([(0, count)], np.uint32)
        names = {p.name for p in spec.params}
        made = run_kernel(device, spec, {n: v for n, v in given.items() if n in names})
        given[state] = made[state]
        results.append(made["y"][:count])
        start += count
    return np.concatenate(results), given[state]


@pytest.mark.parametrize("name", KERNELS)
def test_chunks_of_any_size_give_what_single_tokens_give(name: str, device: Device) -> None:
    """Bit for bit: a state is moved on token by token in every launch."""
    whole = KERNELS[name]
    inputs = whole.make_inputs(np.random.default_rng(3))
    single = of_single_rows(whole)
    expected, state = steps(device, single, inputs, [1] * TOKENS)
    assert np.isfinite(expected).all()
    for counts in ([TOKENS], [1, 2, 26], [3, 9, 16, 1]):
        results, after = steps(device, whole, inputs, counts)
        np.testing.assert_array_equal(results, expected)
        np.testing.assert_array_equal(after[1], state[1])
        state_name = next(p.name for p in whole.params if p.shape[:1] == ("sequences",))
        np.testing.assert_array_equal(after[0], inputs[state_name][0])


@pytest.mark.parametrize("name", KERNELS)
def test_segments_side_by_side_give_what_single_tokens_give(name: str, device: Device) -> None:
    """Bit for bit, wherever they lie and whatever is beside them; other states stay."""
    spec = replace(KERNELS[name], rows=40, sequences=5, segments=4)
    rng = np.random.default_rng(8)
    lengths = {0: 17, 2: 23, 3: 5}
    tokens = {s: spec.make_inputs(rng) for s in lengths}
    shared = tokens[0]
    by_row = {p.name for p in spec.params if p.shape[:1] == ("rows",)} & shared.keys()
    state = next(p.name for p in spec.params if p.shape[:1] == ("sequences",))
    results: dict[int, list[Any]] = {s: [] for s in lengths}
    after, done = shared[state], dict.fromkeys(lengths, 0)
    for parts in ({2: 7, 0: 12}, {3: 5, 0: 5, 2: 15}, {2: 1}):
        given = {n: rng.standard_normal(v.shape).astype(v.dtype) for n, v in shared.items()}
        given |= {n: v for n, v in shared.items() if n not in by_row} | {state: after}
        given["sequence"], given["position"] = (np.full(40, n, np.uint32) for n in (1, IDLE))
        given["segment"], start = np.full((4, 2), 40, np.uint32), 0
        places = []
        for i, (s, count) in enumerate(parts.items()):
            rows, of = slice(start, start + count), slice(done[s], done[s] + count)
            for n in by_row - {"sequence", "position"}:
                given[n][rows] = tokens[s][n][of]
            given["sequence"][rows], given["position"][rows] = s, np.arange(of.start, of.stop)
            given["segment"][i] = start, start + count
            places.append((s, rows))
            done[s] = of.stop
            start += 8 * (1 + (count - 1) // 8) + 8 * i
        made = run_kernel(device, spec, given)
        after = made[state]
        idle = given["position"] == IDLE
        assert not made["y"][idle].any()
        for s, rows in places:
            results[s].append(made["y"][rows])
    assert done == lengths
    np.testing.assert_array_equal(after[[1, 4]], shared[state][[1, 4]])
    single = of_single_rows(replace(spec, sequences=2))
    for s, count in lengths.items():
        own = tokens[s] | {n: v for n, v in shared.items() if n not in by_row}
        own[state] = shared[state][:2]
        expected, alone = steps(device, single, own, [1] * count)
        np.testing.assert_array_equal(np.concatenate(results[s]), expected)
        np.testing.assert_array_equal(after[s], alone[1])


def test_too_many_segments_are_refused() -> None:
    with pytest.raises(PtxgenError, match="5 segments in 32 rows"):
        replace(KERNELS["delta rule"], segments=5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"heads": 3}, "3 heads"),
        ({"key_dim": 6}, "multiples of 4"),
        ({"heads": 2, "value_dim": 1}, "multiples of 4"),
        ({"key_dim": 4 * 67}, "at most 64"),
        ({"floor": 1.0}, "up to 0"),
        ({"negated": True}, "without a floor"),
        ({"delta": False, "channels": True}, "belong to the delta rule"),
    ],
)
def test_a_recurrence_refuses(fields: dict[str, Any], text: str) -> None:
    rule = {"heads": 4, "key_heads": 2, "key_dim": 32, "value_dim": 20, "delta": True}
    with pytest.raises(PtxgenError, match=text):
        GatedRecurrence(*PROMPT, HeadsRule(**rule | fields))


def test_a_selective_scan_refuses_what_exceeds_registers() -> None:
    with pytest.raises(PtxgenError, match="264 values: at most 64"):
        replace(KERNELS["selective scan"], size=8 * 33)


def test_a_scan_of_single_rows_takes_no_segments_and_one_of_prompts_some() -> None:
    prompt = KERNELS["selective scan"]
    with pytest.raises(PtxgenError, match="no segments"):
        replace(prompt, segments=0)
    with pytest.raises(PtxgenError, match="prefill_scan"):
        replace(of_single_rows(prompt), segments=1)


@dataclass(frozen=True)
class Late(GatedRecurrence):
    """One whose states are too many to be read early."""

    reads_early = False


def test_states_of_many_rows_are_read_after_the_wait(device: Device) -> None:
    """Where they fit beside the launch before, they are read while it still works."""
    late = Late(4, 3, 64, 0, HeadsRule(4, 2, 36, 20, delta=False))
    rule = HeadsRule(24, 1, 256, 128, delta=False)
    few, many = (GatedRecurrence(n, 8, 64, 0, rule) for n in (1, 2))
    assert few.reads_early
    assert not many.reads_early
    assert not replace(few, segments=1).reads_early
    check_kernel(device, late)
