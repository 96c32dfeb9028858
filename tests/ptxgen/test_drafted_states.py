"""States in steps that verify drafts: the bits of token by token, whatever is accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.ptxgen.test_recurrent import KERNELS, of_single_rows
from urdir.driver import Device, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv, tail_slots
from urdir.ptxgen.kernels.recurrent.drafted_recurrence import DraftedRecurrence
from urdir.ptxgen.kernels.recurrent.drafted_rows import kept_slots
from urdir.ptxgen.kernels.recurrent.drafted_scan import DraftedScan
from urdir.ptxgen.kernels.recurrent.heads import HeadsRule
from urdir.ptxgen.kernels.recurrent.prefill_conv import PrefillConv
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.render.kernel import field_values

IDLE = 0xFFFFFFFF
SEQUENCES, MOST, TOKENS, PROMPTS = 3, 3, 25, (6, 1, 0)


def of_drafts(spec: RecurrentRows, rows: int, *, drafted: bool) -> RecurrentRows:
    """The kernel that does what ``spec`` of single rows does, where steps have drafts."""
    shape = {"rows": rows, "sequences": SEQUENCES, "most": MOST, "drafted": drafted}
    if isinstance(spec, CausalConv):
        return replace(spec, **shape)
    kernel = DraftedScan if isinstance(spec, SelectiveScan) else DraftedRecurrence
    return kernel(**field_values(spec) | shape)


def of_prompts(spec: RecurrentRows) -> RecurrentRows:
    """The kernel for prompts of all sequences, in as many segments."""
    spec = replace(spec, rows=8 * SEQUENCES, sequences=SEQUENCES, segments=SEQUENCES)
    return replace(spec, most=MOST) if isinstance(spec, PrefillConv) else spec


class Steps:
    """Rows of a model's steps through a kernel; ``inputs`` are those of each sequence's tokens."""

    def __init__(self, device: Device, whole: RecurrentRows, rng: np.random.Generator) -> None:
        self.device, self.whole, self.rng = device, whole, rng
        self.single = of_single_rows(whole)
        tokens = replace(self.single, rows=TOKENS)
        self.inputs = [tokens.make_inputs(rng) for _ in range(SEQUENCES)]
        self.by_row = [p.name for p in whole.params if p.shape[:1] == ("rows",) and p.name != "y"]
        self.by_row = [name for name in self.by_row if name not in ("sequence", "position")]
        self.shared = {
            p.name: self.inputs[0][p.name]
            for p in self.single.params
            if p.name in self.inputs[0] and p.shape[0] not in ("rows", "sequences")
        }
        drafted = of_drafts(self.single, 1, drafted=True)
        self.state = {
            p.name: rng.standard_normal(drafted.shape_of(p)).astype(np.float32)
            for p in drafted.params
            if p.shape[0] == "sequences" and p.dtype == "f32"
        }
        self.state_at = np.zeros(SEQUENCES, np.uint32)

    def expected(self, sequence: int) -> tuple[Any, Any]:
        """Results, and the state after each token, by a launch a token."""
        given = self.inputs[sequence] | self.shared
        name = next(p.name for p in self.single.params if p.shape[0] == "sequences")
        given[name] = np.zeros((2, *self.single.shape_of(self.single.param(name))[1:]), np.float32)
        single = replace(self.single, sequences=2)
        results, states = [], []
        for count in range(1, TOKENS + 1):
            part = {n: given[n][count - 1 : count] for n in self.by_row}
            rows = {"sequence": np.array([1], np.uint32)}
            rows["position"] = np.array([count - 1], np.uint32)
            made = run_kernel(self.device, single, given | part | rows)
            given[name] = made[name]
            results.append(made["y"][0])
            states.append(made[name][1])
        return np.array(results), np.array(states)

    def run(self, spec: RecurrentRows, rows: list[tuple[int, int, bool]], **more: Any) -> Any:
        """The results of ``rows``: sequence, position, and whether the token is the right one;
        padding rows have sequence -1."""
        given = self.shared | self.state | {"state_at": self.state_at} | more
        for name in self.by_row:
            shape = spec.shape_of(spec.param(name))
            given[name] = self.rng.standard_normal(shape).astype(np.float32)
            for row, (sequence, position, is_right) in enumerate(rows):
                if sequence >= 0 and is_right:
                    given[name][row] = self.inputs[sequence][name][position]
        given["sequence"] = np.array([max(0, s) for s, _, _ in rows], np.uint32)
        given["position"] = np.array([p if s >= 0 else IDLE for s, p, _ in rows], np.uint32)
        names = {p.name for p in spec.params}
        made = run_kernel(self.device, spec, {n: x for n, x in given.items() if n in names})
        self.state |= {name: x for name, x in made.items() if name in self.state}
        return made["y"]


@pytest.mark.parametrize("name", KERNELS)
def test_drafts_that_are_accepted_move_states_on(name: str, device: Device) -> None:
    """Several sequences after prompts, with any number of drafts of which any number is right."""
    rng = np.random.default_rng(11)
    of = Steps(device, KERNELS[name], rng)
    expected = [of.expected(sequence) for sequence in range(SEQUENCES)]
    prompts = of_prompts(of.whole)
    rows, bounds = [(-1, 0, False)] * prompts.rows, np.full((SEQUENCES, 2), prompts.rows, np.uint32)
    of_prompt = [(s, length) for s, length in enumerate(PROMPTS) if length]
    for number, (s, length) in enumerate(of_prompt):
        rows[8 * number : 8 * number + length] = [(s, at, True) for at in range(length)]
        bounds[number] = 8 * number, 8 * number + length
    y = of.run(prompts, rows, segment=bounds)
    for row, (s, at, _) in enumerate(rows):
        if s >= 0:
            np.testing.assert_array_equal(y[row], expected[s][0][at])
    at, next_state_at = list(PROMPTS), [IDLE] * SEQUENCES
    drafted_steps = 0
    while min(at) < TOKENS:
        plain = rng.random() < 0.3
        rows = []
        for s in rng.permutation(SEQUENCES).tolist():
            room = TOKENS - at[s] - 1
            if room < 0 or rng.random() < 0.2:
                continue
            drafts = 0 if plain else int(rng.integers(0, min(MOST, room), endpoint=True))
            right = int(rng.integers(0, drafts, endpoint=True))
            rows += [(s, at[s] + i, i <= right) for i in range(drafts + 1)]
            of.state_at[s], next_state_at[s] = min(next_state_at[s], at[s]), at[s] + 1
            at[s] += right + 1
        rows += [(-1, 0, False)] * (SEQUENCES * (MOST + 1) - len(rows))
        y = of.run(of_drafts(of.single, len(rows), drafted=not plain), rows)
        for row, (s, position, is_right) in enumerate(rows):
            if s < 0:
                assert not y[row].any()
            elif is_right:
                np.testing.assert_array_equal(y[row], expected[s][0][position])
        drafted_steps += not plain
    assert drafted_steps > 4
    if "state" in of.state:
        for s, after in enumerate(next_state_at):
            np.testing.assert_array_equal(of.state["state"][s], expected[s][1][after - 1])


def test_slots_have_room_for_what_is_read_and_written() -> None:
    """Accepted drafts and new ones; earlier values of a convolution and a step's rows."""
    for most in range(1, 32):
        assert 2 * most < kept_slots(most) <= 4 * most
        for taps in (2, 4, 9):
            slots = tail_slots(taps, most)
            assert taps - 1 + most + 1 <= slots < 2 * (taps + most)
            assert slots.bit_count() == kept_slots(most).bit_count() == 1
    assert tail_slots(4, 0) == 3


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"most": 0}, "at most 0 drafts"), ({"most": 32}, "at most 32"), ({"segments": 1}, "prompts")],
)
def test_bad_numbers_of_drafts_are_refused(fields: dict[str, int], text: str) -> None:
    spec = DraftedRecurrence(8, 2, 64, 0, HeadsRule(4, 2, 32, 20, delta=True), most=3, drafted=True)
    with pytest.raises(PtxgenError, match=text):
        replace(spec, **fields)


def test_a_convolution_refuses_drafted_rows_without_a_number() -> None:
    with pytest.raises(PtxgenError, match="drafted rows of no drafts"):
        CausalConv(2, 2, 64, 0, channels=12, taps=4, drafted=True)
