"""Recurrences by chunks against the sequential reference: any length, any division, any range."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from urdir.driver import Device, check_kernel, run_kernel
from urdir.driver.compare import compare
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.choice import CHUNKED_ROWS, recurrences
from urdir.ptxgen.kernels.recurrent.chunked_recurrence import ChunkedRecurrence
from urdir.ptxgen.kernels.recurrent.gated_recurrence import GatedRecurrence
from urdir.ptxgen.kernels.recurrent.heads import HeadsRule
from urdir.ptxgen.kernels.recurrent.prepare_chunks import PrepareChunks
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.spec import Access

IDLE = 0xFFFFFFFF
PROMPT = {"rows": 96, "sequences": 2, "max_len": 512, "segments": 1}
DELTA = HeadsRule(2, 1, 16, 20, delta=True, eps=1e-6)
SCAN = HeadsRule(2, 1, 16, 20, delta=False, order="vkq")
RULES = {
    "scan": SCAN,
    "steady": replace(SCAN, key_heads=2, order="apart", steady=True),
    "delta": DELTA,
    "channels": replace(DELTA, key_heads=2, order="apart", channels=True),
}
KINDS = {name: GatedRecurrence(**PROMPT, rule=rule) for name, rule in RULES.items()}
each_kind = pytest.mark.parametrize("kind", KINDS)


def by_chunks(spec: GatedRecurrence) -> tuple[PrepareChunks, ChunkedRecurrence]:
    """The kernels that do the same by chunks."""
    same = {field.name: getattr(spec, field.name) for field in fields(PrepareChunks)}
    return PrepareChunks(**same), ChunkedRecurrence(**same)


def run(device: Device, spec: GatedRecurrence, inputs: dict[str, Any]) -> dict[str, Any]:
    """State and results by chunks: both kernels."""
    prepare, move = by_chunks(spec)
    arrays = prepare.prepared_params(Access.INOUT)
    empty = {p.name: np.zeros(prepare.shape_of(p), p.numpy_dtype) for p in arrays}
    made = run_kernel(device, prepare, taken(prepare, inputs | empty))
    return run_kernel(device, move, taken(move, inputs | made))


def taken(spec: RecurrentRows, inputs: dict[str, Any]) -> dict[str, Any]:
    """Of inputs, what a kernel reads."""
    return {p.name: inputs[p.name] for p in spec.params if p.access is not Access.OUT}


def inputs_of(spec: GatedRecurrence, lengths: list[int], seed: int = 3) -> dict[str, Any]:
    """Segments of such lengths, of sequences in falling order; the second goes on from a state."""
    inputs = spec.make_inputs(np.random.default_rng(seed))
    bounds = np.full((spec.segments, 2), spec.rows, np.uint32)
    sequence = np.full(spec.rows, 0, np.uint32)
    position = np.full(spec.rows, IDLE, np.uint32)
    start = 0
    for i, length in enumerate(lengths):
        bounds[i] = start, start + length
        sequence[start : start + length] = spec.sequences - 1 - i
        position[start : start + length] = np.arange(length) + 7 * (i == 1)
        start += -(-length // 8) * 8
    return inputs | {"segment": bounds, "sequence": sequence, "position": position}


def check(device: Device, spec: GatedRecurrence, inputs: dict[str, Any]) -> dict[str, Any]:
    """Within the kernel's tolerance of the reference token by token."""
    outputs = run(device, spec, inputs)
    assert all(np.isfinite(array).all() for array in outputs.values())
    compare(by_chunks(spec)[1], outputs, spec.reference(**inputs))
    return outputs


@pytest.mark.slow
@each_kind
def test_segments_of_any_length(kind: str, device: Device) -> None:
    """Side by side in one launch, and bit for bit what one of them is alone."""
    lengths = [1, 65, 15, 63, 64, 200]
    spec = replace(KINDS[kind], rows=424, sequences=7, segments=8)
    inputs = inputs_of(spec, lengths)
    together = check(device, spec, inputs)
    np.testing.assert_array_equal(together["state"][0], inputs["state"][0])
    single = replace(spec, rows=80, segments=1)
    by_row = {p.name for p in spec.params if p.shape[:1] == ("rows",)}
    own = {name: x[8:88] if name in by_row else x for name, x in inputs.items()}
    alone = run(device, single, own | {"segment": np.array([(0, 65)], np.uint32)})
    np.testing.assert_array_equal(alone["y"][:65], together["y"][8:73])
    np.testing.assert_array_equal(alone["state"][5], together["state"][5])


@each_kind
def test_a_prompt_divided_anywhere(kind: str, device: Device) -> None:
    """Of 90 tokens; every part is compared with the reference from the very state before it."""
    spec = KINDS[kind]
    whole = inputs_of(spec, [90])
    expected = spec.reference(**whole)
    by_row = {p.name for p in spec.params if p.shape[:1] == ("rows",)}
    for counts in ([1, 89], [33, 31, 26]):
        state, start, results = whole["state"], 0, []
        for count in counts:
            given = {n: np.roll(x, -start, 0) if n in by_row else x for n, x in whole.items()}
            given |= {"segment": np.array([(0, count)], np.uint32), "state": state}
            made = run(device, spec, given)
            state, start = made["state"], start + count
            results.append(made["y"][:count])
        y = np.concatenate([*results, np.zeros_like(expected["y"][90:])])
        _, chunked = by_chunks(spec)
        compare(chunked, {"y": y, "state": state}, expected)


@each_kind
def test_the_same_bits_again(kind: str, device: Device) -> None:
    inputs = inputs_of(KINDS[kind], [70])
    first, again = (run(device, KINDS[kind], inputs) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(again[name], array)


@pytest.mark.parametrize("kind", ["scan", "delta", "channels"])
def test_decays_of_nothing_and_of_all(kind: str, device: Device) -> None:
    """Tokens that forget all, and others that forget nothing, in any order."""
    inputs = inputs_of(KINDS[kind], [90])
    rng = np.random.default_rng(5)
    inputs["alpha"] = rng.choice(np.float32([-90, -12, 0, 30, 3e4]), inputs["alpha"].shape)
    if kind == "scan":  # what is added has the factor dt
        inputs["alpha"] = np.minimum(inputs["alpha"], 30)
        inputs["a"] = -np.float32([1e-4, 50])
    check(device, KINDS[kind], inputs)


@pytest.mark.parametrize("kind", ["steady", "scan"])
@pytest.mark.parametrize(("keys", "values"), [(3e4, 1e6), (1e-7, 1e-6), (1e6, 1e-9)])
def test_ranges_beyond_f16(kind: str, keys: float, values: float, device: Device) -> None:
    spec, rule = KINDS[kind], KINDS[kind].rule
    inputs = inputs_of(spec, [90])
    inputs["state"] *= np.float32(keys * values)
    arrays, offsets = rule.qkv.arrays, rule.qkv.offsets
    for name, factor in (("k", keys), ("v", values)):
        width = rule.heads * rule.value_dim if name == "v" else rule.key_heads * rule.key_dim
        rows = inputs[arrays[name]].reshape(spec.rows, -1)
        rows[:, offsets[name] : offsets[name] + width] *= np.float32(factor)
    if kind == "scan":
        inputs["skip"][:] = 0.0  # of v alone
    check(device, spec, inputs)


@pytest.mark.parametrize("kind", ["delta", "channels"])
def test_keys_that_are_all_alike(kind: str, device: Device) -> None:
    """Each token takes all of the one before it away: the system is as far from I as it can be."""
    spec = KINDS[kind]
    inputs = inputs_of(spec, [90])
    name, first = spec.rule.qkv.arrays["k"], spec.rule.qkv.offsets["k"]
    rows = inputs[name].reshape(spec.rows, -1)
    width = spec.rule.key_heads * spec.rule.key_dim
    rows[:, first : first + width] = rows[:1, first : first + width]
    inputs["beta"][:] = 12.0
    inputs["alpha"][:] = -20.0
    check(device, spec, inputs)


@pytest.mark.parametrize("delta", [False, True])
def test_heads_that_a_cta_prepares(delta: bool, device: Device) -> None:
    """Of more than a GPU has room for: 129 share keys, two a CTA and one for the last."""
    order = "qkv" if delta else "vkq"
    rule = HeadsRule(516, 4, 16, 4, delta=delta, order=order, tiled=delta)
    spec = PrepareChunks(8, 1, 64, 1, rule)
    assert spec.heads_each == 2
    check_kernel(device, spec)


@pytest.mark.parametrize(
    "fields",
    [{"key_dim": 24}, {"key_dim": 144}, {"value_dim": 18}, {"segments": 0, "rows": 1}],
)
def test_what_has_no_chunked_form(fields: dict[str, Any]) -> None:
    rows = PROMPT | {name: of for name, of in fields.items() if name in PROMPT}
    rule = replace(DELTA, **{name: of for name, of in fields.items() if name not in PROMPT})
    with pytest.raises(PtxgenError, match="segments"):
        ChunkedRecurrence(**rows, rule=rule)


def kinds_of(
    rule: dict[str, Any], *, target: str = "sm_90a", exact: bool = False, **rows: int
) -> list[type[RecurrentRows]]:
    """What is chosen for a prompt of `DELTA`, some of it changed."""
    kernels = recurrences(target, replace(DELTA, **rule), exact=exact, **PROMPT | rows)
    return [type(kernel) for kernel in kernels]


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ({}, {"rows": CHUNKED_ROWS - 1}),
        ({}, {"segments": 0}),
        ({}, {"exact": True}),
        ({"key_dim": 20}, {}),
        ({"key_dim": 256}, {}),
        ({"value_dim": 18}, {}),
        ({}, {"target": "sm_80"}),
    ],
)
def test_what_goes_token_by_token(rule: dict[str, Any], changed: dict[str, Any]) -> None:
    assert kinds_of(rule, **changed) == [GatedRecurrence]


@pytest.mark.parametrize(
    ("rule", "target"),
    [
        ({}, "sm_90a"),
        ({"key_dim": 256, "delta": False}, "sm_90a"),
        ({}, "sm_100"),
        ({"channels": True}, "sm_90a"),
    ],
)
def test_what_goes_by_chunks(rule: dict[str, Any], target: str) -> None:
    assert kinds_of(rule, target=target) == [PrepareChunks, ChunkedRecurrence]
