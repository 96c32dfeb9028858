"""The kernel suite on every kernel of the catalog, and a few tests of single kernels.

With ``-s`` the assembly tests print what each kernel costs on each target.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.driver.launch import launch, pack
from urdir.model.verify.kernel_suite import (
    EmulatorSuite,
    TextSuite,
    assemble_without_spills,
    check,
    targets,
)
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.argmax import Argmax, indices
from urdir.ptxgen.kernels.attention.cached_tokens import CachedTokens
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.embedding import Embedding
from urdir.ptxgen.kernels.gather import Gather
from urdir.ptxgen.kernels.linear.cut import CutOptions
from urdir.ptxgen.kernels.linear.pack import Pack
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.kernels.ngram_rows import NgramHash
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.kernels.rescale import Rescale
from urdir.ptxgen.kernels.rotation import Rotation
from urdir.ptxgen.kernels.sample import Sample
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN
from urdir.ptxgen.render.kernel import text_fields
from urdir.ptxgen.spec import KernelSpec, smallest_example
from urdir.ptxgen.target import TESTED
from urdir.ptxgen.weights.formats import FORMATS, Format

SILU = Activation("silu")
EXAMPLES = [
    pytest.param(spec, id=f"{kind.name}-{name}")
    for kind in kernels().values()
    for name, spec in kind.examples().items()
]
SMALLEST = [pytest.param(smallest_example(kind), id=name) for name, kind in kernels().items()]

every_example = pytest.mark.parametrize("spec", EXAMPLES)
every_kernel = pytest.mark.parametrize("spec", SMALLEST)


def inputs_of(spec: KernelSpec) -> dict[str, Any]:
    return spec.make_inputs(np.random.default_rng(7))


# ---- the suite that anybody's kernel gets ----


@pytest.mark.turns(32)
class TestCatalog(TextSuite):
    """Every kernel of the catalog; those on the GPU are in tests/gpu."""

    kernels = tuple(kernels().values())


class TestOnTheEmulator(EmulatorSuite):
    """By turns with the emulator's sanitizer, which compares with the reference, too
    (test_races.py)."""

    kernels = tuple(kernels().values())

    @pytest.mark.turns(16, which=8)
    def test_it_agrees_with_its_reference(self, spec: KernelSpec, urdir_emulator: Device) -> None:
        super().test_it_agrees_with_its_reference(spec, urdir_emulator)

    @pytest.mark.turns(2)
    def test_it_runs_on_another_target(self, small_spec: KernelSpec, other_target: str) -> None:
        super().test_it_runs_on_another_target(small_spec, other_target)


#: Kernels with more examples than this have a test file of their own.
FEW_EXAMPLES = 24


def options(value: Any, path: str) -> Iterator[tuple[str, object]]:
    """What templates branch on: words, truth values, and whether a number or a part is given."""
    if isinstance(value, bool | str | None):
        yield path, value
    elif isinstance(value, float):
        yield path, (value == 0, value == 1)
    elif isinstance(value, tuple):
        yield path, bool(value)
        for part in value:
            yield from options(part, path) if dataclasses.is_dataclass(part) else ()
    elif dataclasses.is_dataclass(value) and not isinstance(value, Format):
        yield path, type(value)
        for field in dataclasses.fields(value):
            yield from options(getattr(value, field.name), f"{path}.{field.name}")


def with_new_options(kind: type[KernelSpec]) -> Iterator[Any]:
    """The examples with an option that none before has, but for those that others run by default:
    the first (test_races.py) and the fifth."""
    seen: set[tuple[str, object]] = set()
    for at, (name, spec) in enumerate(kind.examples().items()):
        own = {each for path, value in text_fields(spec).items() for each in options(value, path)}
        if not own <= seen and at not in (0, 4):
            yield pytest.param(spec, id=f"{kind.name}-{name}")
        seen |= own


@pytest.mark.parametrize(
    "spec",
    [
        each
        for kind in kernels().values()
        if len(kind.examples()) <= FEW_EXAMPLES
        for each in with_new_options(kind)
    ],
)
def test_every_option_agrees_with_the_reference(spec: KernelSpec, emulator: Device) -> None:
    """Turns may pass over all examples that take a branch of a template."""
    check(emulator, spec, inputs_of(spec))


@pytest.mark.full
@every_example
def test_it_assembles_for_every_target(spec):
    for target in targets(spec):
        assemble_without_spills(spec, target)


# ---- the spec ----


@pytest.mark.parametrize("kind", kernels().values(), ids=kernels())
def test_the_key_tells_every_field_and_target_apart(kind):
    for name, spec in kind.examples().items():
        tested = targets(spec)
        keys = [spec.key(target) for target in tested]
        for field, value in text_fields(spec).items():
            other = copy.copy(spec)
            object.__setattr__(other, field, another(value))  # past the checks of the constructor
            keys.append(other.key(tested[-1]))
        assert len(set(keys)) == len(keys), name
        assert copy.deepcopy(spec).key(tested[0]) == keys[0], name


@pytest.mark.parametrize(
    ("longer", "field"),
    [
        (replace(CachedTokens.examples()["latent"], unit=1), "tokens"),
        (Pack(40, 259, room=40), "rows"),
        (replace(GemmWgmma.examples()["heads"], batch=37), "batch"),
        (Sample(61, 9, rows=40, sequences=4), "rows"),
        (Advance(20, rows=40, sequences=40, slots=4), "rows"),
        (Argmax(4100, rows=40), "rows"),
        (replace(smallest_example(Embedding), rows=40), "rows"),
        (Gather(37, 40, rows=40), "rows"),
        (PrefillWgmma(8, KvLayout(1, 4, 64, 64, "f16"), 65), "rows"),
        (PrefillWgmma(8, KvLayout(1, 4, 64, 64, "f16"), 80, packs=True), "rows"),
    ],
)
def test_fields_of_launches_change_the_grid_alone(longer, field):
    target = longer.targets[-1]
    shorter = replace(longer, **{field: getattr(longer, field) // 20 * 8})
    assert (shorter.key(target), shorter.ptx(target)) == (longer.key(target), longer.ptx(target))
    assert shorter.launch_shape.grid < longer.launch_shape.grid
    assert replace(shorter.launch_shape, grid=longer.launch_shape.grid) == longer.launch_shape


def another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 1
    if isinstance(value, Format):  # decides the targets of a kernel
        alike = [fmt for fmt in FORMATS.values() if fmt.is_float == value.is_float]
        return next(fmt for fmt in alike if fmt != value)
    if isinstance(value, KvLayout):  # so do its widths
        return replace(value, kv_heads=value.kv_heads + 1)
    if isinstance(value, CutOptions):  # decides the targets of a kernel, too
        return replace(value, split=value.split + 1)
    return f"not {value}"


# ---- the text ----


@every_kernel
def test_the_template_begins_with_its_contract(spec):
    contract = spec.ptx(targets(spec)[-1]).split(f"// {type(spec).__name__}(")[0]
    assert contract.startswith(f"// {spec.name}: ")
    assert "// grid: " in contract


@every_kernel
def test_an_older_target_is_refused(spec):
    for target in set(TESTED) - set(targets(spec)):
        with pytest.raises(PtxgenError, match=f"kernel {spec.name} is for {spec.targets[0]}"):
            spec.ptx(target)


#: Every so many examples are rendered in another process, too, unless ``--full``.
RENDERED_TWICE = 16

DIGESTS = """
import hashlib, json, sys
from urdir.ptxgen.catalog import kernels
print(json.dumps([
    (spec.key("sm_90a"), hashlib.sha256(spec.ptx("sm_90a").encode()).hexdigest())
    for kind in kernels().values() for spec in [*kind.examples().values()][::int(sys.argv[1])]
]))
"""


@pytest.fixture(scope="module")
def elsewhere(pytestconfig: pytest.Config) -> dict[str, str]:
    """Spec key -> digest of the PTX, from a process whose hashes are salted differently."""
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    step = 1 if pytestconfig.getoption("--full") else RENDERED_TWICE
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, str(step)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.turns(RENDERED_TWICE)
@every_example
def test_rendering_gives_the_same_bytes_in_every_process(spec, elsewhere):
    text = spec.ptx("sm_90a")
    assert copy.deepcopy(spec).ptx("sm_90a") == text
    assert elsewhere[spec.key("sm_90a")] == hashlib.sha256(text.encode()).hexdigest()
    assert text.isascii()


# ---- single kernels ----


def argmax(emulator, logits, **fields):
    """Indices of the rows' highest ranks, as the kernel finds them."""
    rows, n = logits.shape
    ranks = run_kernel(emulator, Argmax(n=n, rows=rows, **fields), {"logits": logits})["ranks"]
    return indices(ranks.max(axis=1)).tolist()


@pytest.mark.parametrize(
    ("logits", "index"),
    [
        ([-np.inf] * 300, INVALID_TOKEN),
        ([np.nan] * 300, INVALID_TOKEN),
        ([-np.inf, -np.inf, -3.0, -3.0], 2),
        ([-np.inf, -np.nan, -3.0], INVALID_TOKEN),
        ([-0.0, 0.0, -0.0], 0),
        ([1.0] * 299 + [2.0], 299),
        ([1.0] * 260 + [np.inf, 2.0], INVALID_TOKEN),
        ([3.4e38, -3.4e38, 3.4e38], 0),
        # over several slices
        ([-np.inf] * 3000, INVALID_TOKEN),
        ([1.0] * 2999 + [np.nan], INVALID_TOKEN),
        ([-np.inf] * 2999 + [-3.4e38], 2999),
        ([-1.0] * 1030 + [-0.0] * 1030 + [0.0] * 1030, 1030),
        ([np.nan] + [3.0] * 1024 + [1.0] * 1500, INVALID_TOKEN),
        ([-np.inf] * 2048 + [-1.0] + [-np.inf] * 2000, 2048),
    ],
)
def test_argmax_of_special_values(logits, index, emulator):
    assert argmax(emulator, np.array([logits], np.float32)) == [index]


@pytest.mark.parametrize("at", [0, 1, 4099, 16384, 19999, 20000])
def test_argmax_finds_the_one(at, emulator):
    logits = np.zeros((1, 20_001), np.float32)
    logits[0, at] = 1
    assert argmax(emulator, logits) == [at]


@pytest.mark.parametrize(
    "n", [2, 4, 31, 127, 128, 129, 512, 1023, 1024, 1025, 1028, 4095, 4096, 32_771]
)
def test_argmax_around_the_sizes_where_its_code_changes(n, emulator):
    spec = Argmax(n=n)
    check(emulator, spec, inputs_of(spec))
    falling = -np.arange(n, dtype=np.float32)
    for logits, index in ((falling, 0), (falling[::-1], n - 1)):
        assert argmax(emulator, logits.reshape(1, n).copy()) == [index]


@pytest.mark.parametrize("n", [1, 3, 4, 127, 128, 1023, 1024, 1025, 4095, 4096, 4097, 8193])
def test_argmax_of_each_row(n, emulator):
    spec = Argmax(n=n, rows=3)
    check(emulator, spec, inputs_of(spec))
    logits = np.zeros((3, n), np.float32)
    at = [0, n // 2, n - 1]
    logits[range(3), at] = 1
    assert argmax(emulator, logits) == at


@pytest.mark.parametrize("width", [1024, 2048, 4096])
def test_argmax_takes_the_lowest_index_of_equals_in_several_slices(width, emulator):
    logits = np.full((2, 9001), -7, np.float32)
    logits[0, [8999, 5000, 4096]] = -2
    logits[1, [9000, 1023, 1024]] = 3
    assert argmax(emulator, logits, width=width) == [4096, 1023]
    logits[:] = -7
    assert argmax(emulator, logits, width=width) == [0, 0]


@pytest.mark.parametrize(
    ("spec", "output", "over"),
    [
        (Add(n=515), "y", "a"),
        (Add(n=515), "y", "b"),
        (Activate(515, SILU, gated=True), "y", "gate"),
        (Activate(515, SILU, gated=True), "y", "up"),
        (Normalise(rows=3, cols=516, norm=Norm("rms", 1e-5)), "y", "x"),
        (Normalise(rows=1, cols=20484, norm=Norm("rms", 1e-5)), "y", "x"),
    ],
    ids=lambda value: value.name if isinstance(value, KernelSpec) else value,
)
def test_an_output_may_lie_over_an_input(spec, output, over, emulator):
    inputs = inputs_of(spec)
    expected = run_kernel(emulator, spec, inputs)[output]
    buffers = {}
    for name, value in inputs.items():
        buffers[name] = emulator.allocate(value.nbytes, name)
        buffers[name].upload(value)
    args = {**buffers, output: buffers[over]}
    with emulator.create_stream() as stream:
        launch(emulator.load(spec), pack(spec, args), stream)
        stream.synchronize()
    result = buffers[over].download(np.float32, expected.shape)
    assert result.tobytes() == expected.tobytes()
    for buffer in buffers.values():
        buffer.close()


def test_silu_at_its_ends(emulator):
    gate = np.array([0, -0.0, 100, -100, 1e4, -1e4, 3e38, -3e38, np.inf, np.nan], np.float32)
    up = np.full(gate.size, 1.0, np.float32)
    y = run_kernel(emulator, Activate(gate.size, SILU, gated=True), {"gate": gate, "up": up})["y"]
    assert y[:2].tolist() == [0, 0]
    np.testing.assert_array_equal(y[[2, 4, 6, 8]], gate[[2, 4, 6, 8]])
    np.testing.assert_allclose(y[[3, 5, 7]], 0, atol=1e-41)
    assert np.isnan(y[9])


def test_silu_is_accurate_relative_to_each_value(emulator):
    gate = np.linspace(-20, 20, 4001, dtype=np.float32)
    up = np.ones_like(gate)
    y = run_kernel(emulator, Activate(gate.size, SILU, gated=True), {"gate": gate, "up": up})["y"]
    exact = gate.astype(np.float64)
    exact = exact / (1 + np.exp(-exact))
    np.testing.assert_allclose(y, exact, rtol=3e-6)


@pytest.mark.parametrize("kind", ["gelu", "sigmoid", "softplus", "silu"])
def test_activations_are_accurate_relative_to_each_value(kind, emulator):
    small = np.geomspace(1e-7, 1, 700, dtype=np.float32)
    x = np.concatenate([-small, small, np.linspace(-5, 12, 2001, dtype=np.float32)])
    spec = Activate(x.size, Activation(kind))
    y = run_kernel(emulator, spec, {"x": x})["y"]
    np.testing.assert_allclose(y, spec.activation(x), rtol=1e-5 if kind == "gelu" else 2e-6)


def test_xielu_is_continuous_and_its_parts_are_accurate(emulator):
    x = np.linspace(-9, 3, 3001, dtype=np.float32)
    spec = Activate(x.size, Activation("xielu", parameters=(0.8, 0.7, 0.5, -1e-6)))
    y = run_kernel(emulator, spec, {"x": x})["y"]
    np.testing.assert_allclose(y, spec.activation(x), rtol=2e-6, atol=5e-7)


def test_a_nan_stays_one(emulator):
    x = np.full(4, np.nan, np.float32)
    for kind in ("silu", "gelu", "relu", "relu2", "sigmoid", "softplus"):
        assert np.isnan(run_kernel(emulator, Activate(4, Activation(kind)), {"x": x})["y"]).all()
    limited = Activate(4, Activation("silu", limit=1.0), gated=True)
    assert np.isnan(run_kernel(emulator, limited, {"gate": x, "up": x})["y"]).all()
    assert np.isnan(run_kernel(emulator, Rescale(4, softcap=3.0, clamp=1.0), {"x": x})["y"]).all()


def test_a_soft_cap_is_accurate_and_never_exceeded(emulator):
    x = np.concatenate([np.geomspace(1e-9, 1e9, 2000), -np.geomspace(1e-9, 1e9, 2000), [0, np.inf]])
    x = x.astype(np.float32)
    y = run_kernel(emulator, Rescale(x.size, softcap=30.0), {"x": x})["y"]
    np.testing.assert_allclose(y, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6)
    assert np.abs(y).max() == 30


@pytest.mark.parametrize("scale", [1e-18, 1e-3, 1e3, 1e17])
def test_norms_over_the_range_of_values(scale, emulator):
    spec = Normalise(rows=2, cols=300, norm=Norm("rms", 1e-30))
    inputs = inputs_of(spec)
    inputs["x"] = (inputs["x"] * scale).astype(np.float32)
    check(emulator, spec, inputs)


def test_shapes_that_make_no_sense_are_refused():
    for make in (
        lambda: Normalise(rows=0, cols=4, norm=Norm("rms", 1e-5)),
        lambda: Normalise(rows=1, cols=0, norm=Norm("rms", 1e-5)),
        lambda: Activate(0, SILU),
        lambda: Activate(4, SILU, group=2),
        lambda: Activate(4, Activation("swiglu_oai")),
        lambda: Activate(4, Activation("silu", limit=1.0)),
        lambda: Activate(5, SILU, gated=True, group=2),
        lambda: Rescale(4, softcap=-1.0),
        lambda: Normalise(rows=1, cols=4, norm=Norm("rms", 1e-5), weight_rows=0),
        lambda: Normalise(2, 4, Norm("rms", 1e-5, weight=False), weight_rows=2),
        lambda: Argmax(n=0),
        lambda: Argmax(n=2**30),
        lambda: Argmax(n=4, rows=0),
        lambda: Argmax(n=4, rows=65536),
        lambda: Argmax(n=4, width=512),
        lambda: Advance(max_len=0),
    ):
        with pytest.raises(PtxgenError):
            make()


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field) for name, kind in kernels().items() for field in kind.limits],
)
def test_limits_of_fields(name, field):
    """Just below, just above, and between the values that it may have."""
    kind = kernels()[name]
    spec, values = smallest_example(kind), kind.limits[field]
    if isinstance(values[0], str):
        wrong = ["no kind"]
    else:
        wrong = [values[0] - 1, values[-1] + 1, values[-1] - 1]
    for value in (value for value in wrong if value not in values):
        with pytest.raises(PtxgenError, match=f"^{name}: {field} is {value}: "):
            replace(spec, **{field: value})


def test_a_field_of_another_type_than_its_range_is_refused_at_once():
    """Python looks for it in a range one by one: for minutes."""
    for n in (1.5, np.int64(1 << 30), "8"):
        with pytest.raises(PtxgenError, match=f"^add: n is .*, a {type(n).__name__}: it must be"):
            Add(n=n)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dilated_conv", {"slots": 8}),
        ("mean_keys", {"layout": KvLayout(1, 2, 40, 64, "f16")}),
        ("mean_keys", {"rotation": Rotation(40, "half")}),
        ("mean_keys", {"rotation": Rotation(32, "interleaved")}),
        ("spread_slots", {"rows": 40000}),
        ("switch_rows", {"other_weight": 1.5}),
        ("switch_rows", {"other_weight": float("nan")}),
    ],
)
def test_fields_that_a_kernel_cannot_have(name, fields):
    with pytest.raises(PtxgenError, match=f"^{name}: "):
        replace(smallest_example(kernels()[name]), **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"multipliers": (1,)},
        {"multipliers": (1, 2, 3)},  # for pairs and triples, with one row
        {"sizes": (0,)},
        {"offsets": (-1,)},
        {"offsets": (2**32,)},
    ],
)
def test_hashes_of_ngrams_that_cannot_be(fields):
    with pytest.raises(PtxgenError, match=r"^ngram_rows: "):
        replace(NgramHash((1, 3), (5,), (128,), 2), **fields)
