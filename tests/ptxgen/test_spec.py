"""What every spec has from its base: sizes, inputs, keys."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest

from urdir.ptxgen import spec as spec_module
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import (
    Access,
    KernelSpec,
    LaunchShape,
    Param,
    Tolerance,
    ceil_div,
    purpose_of,
)


@dataclass(frozen=True)
class Mixed(KernelSpec):
    """Every kind of parameter, of
    two kinds of access. Only the first sentence is its purpose.

    And nothing of this.
    """

    rows: int
    cols: int

    name = "mixed"
    template = ("urdir.templates", "add.ptx.j2")

    @property
    def params(self):
        return (
            Param("a", "f16", ("rows", "cols"), Access.IN),
            Param("b", "bf16", ("cols",), Access.INOUT),
            Param("c", "u64", ("rows", 3), Access.OUT),
            Param("n", "u32"),
            Param("s", "f32"),
        )


def test_sizes():
    s = Mixed(rows=5, cols=7)
    assert [s.shape_of(p) for p in s.params] == [(5, 7), (7,), (5, 3), (), ()]
    assert [s.nbytes(p) for p in s.params if p.is_pointer] == [70, 14, 120]
    assert s.bytes_moved() == 70 + 2 * 14 + 120
    assert [p.is_pointer for p in s.params] == [True, True, True, False, False]


def test_a_shape_that_names_no_attribute_is_refused():
    with pytest.raises(PtxgenError, match=r"mixed, parameter c: the shape names 'rowz'"):
        Mixed(rows=5, cols=7).shape_of(Param("c", "f32", ("rows", "rowz"), Access.OUT))


@pytest.mark.parametrize(
    ("dtype", "access"), [("f33", Access.IN), ("f33", None), ("b32", Access.IN)]
)
def test_a_parameter_of_an_unknown_type_is_refused(dtype, access):
    with pytest.raises(ValueError, match=f"parameter y: '{dtype}' is not one of .*f32"):
        Param("y", dtype, access=access)


@pytest.mark.parametrize(("field", "value"), [("shape", 5), ("shape", ["n"]), ("access", "in")])
def test_a_parameter_has_a_tuple_and_an_access(field, value):
    with pytest.raises(ValueError, match=f"parameter y: {field} is .*, not a"):
        Param("y", "f32", **{field: value})


@pytest.mark.parametrize("extent", [32, (32,), [32, 1, 1]])
@pytest.mark.parametrize("field", ["grid", "block", "cluster"])
def test_an_extent_has_three_numbers(field, extent):
    with pytest.raises(ValueError, match=f"{field} is .*32.*: expected three numbers"):
        LaunchShape(**{"grid": (1, 1, 1), "block": (1, 1, 1), field: extent})


def test_a_parameter_by_name():
    s = Mixed(rows=5, cols=7)
    assert s.param("b").dtype == "bf16"
    with pytest.raises(PtxgenError, match="kernel mixed has no parameter 'z'"):
        s.param("z")


def test_inputs_are_what_a_launch_takes():
    s = Mixed(rows=5, cols=7)
    inputs = s.make_inputs(np.random.default_rng(3))
    assert {k: (np.shape(v), np.asarray(v).dtype) for k, v in inputs.items()} == {
        "a": ((5, 7), np.dtype("f2")),
        "b": ((7,), np.dtype("u2")),
        "n": ((), np.dtype("u4")),
        "s": ((), np.dtype("f4")),
    }
    again = s.make_inputs(np.random.default_rng(3))
    assert all(np.array_equal(inputs[k], again[k]) for k in inputs)
    as_f32 = (inputs["b"].astype(np.uint32) << 16).view(np.float32)
    assert np.all(np.abs(as_f32) < 6)


def test_purpose_is_the_first_sentence():
    assert purpose_of(Mixed) == "Every kind of parameter, of two kinds of access"


def test_a_spec_is_frozen_and_a_value():
    s = Normalise(rows=1, cols=8, norm=Norm("rms", 1e-5))
    assert s == Normalise(rows=1, cols=8, norm=Norm("rms", 1e-5))
    assert hash(s) == hash(Normalise(rows=1, cols=8, norm=Norm("rms", 1e-5)))
    with pytest.raises(FrozenInstanceError):
        s.rows = 2


def test_the_key_is_known_without_rendering(monkeypatch):
    monkeypatch.setattr("urdir.ptxgen.render.frame.render", None)
    key = Normalise(rows=1, cols=8, norm=Norm("rms", 1e-5)).key("sm_90")
    assert key.startswith("normalise-sm_90-")
    assert len(key) == len("normalise-sm_90-") + 20


def test_the_key_needs_no_jinja():
    script = (
        "import sys; from urdir.ptxgen.kernels.norm import Norm\n"
        "from urdir.ptxgen.kernels.normalise import Normalise\n"
        "Normalise(rows=1, cols=8, norm=Norm('rms', 1e-5)).key('sm_90')\n"
        "print('jinja2' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_key_tells_fields_targets_and_sources_apart(monkeypatch):
    keys = {
        Normalise(r, c, Norm("rms", e)).key(t)
        for r in (1, 2)
        for c in (11, 12)
        for e in (1e-5, 1e-6)
        for t in ("sm_80", "sm_90")
    }
    monkeypatch.setattr(
        "urdir.ptxgen.render.sources.source_digest", lambda template: "other sources"
    )
    keys.add(Normalise(1, 11, Norm("rms", 1e-5)).key("sm_80"))
    assert len(keys) == 17


def test_launch_shape_counts_threads():
    assert LaunchShape(grid=(7, 1, 1), block=(8, 4, 2)).threads == 64


@pytest.mark.parametrize(("a", "b", "quotient"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_ceil_div(a, b, quotient):
    assert ceil_div(a, b) == quotient


def test_every_element_type_has_its_size():
    sizes = {name: dtype.itemsize for name, dtype in spec_module.NUMPY_DTYPES.items()}
    bits = {name: int("".join(filter(str.isdigit, name))) for name in sizes}
    assert {name: 8 * size for name, size in sizes.items()} == bits


# ---- tolerances of sums ----


@pytest.mark.parametrize("terms", [1, 7, 100, 4096])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_a_tolerance_covers_a_sum_added_in_order(dtype, terms):
    rng = np.random.default_rng(terms)
    x = rng.standard_normal((400, terms)).astype(np.float32)
    sums = np.zeros(400, np.float32)
    for column in x.T:
        sums += column
    outputs = sums.astype({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float64)
    exact = x.astype(np.float64).sum(axis=1)
    error = np.abs(outputs - exact).max() / np.abs(exact).max()
    bound = Tolerance.of_sum(dtype, terms).rtol
    assert error <= bound
    if terms == 4096:
        assert bound < 60 * error  # and not much more than that


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_rounded_output_and_its_rounded_reference_may_lie_on_either_side_of_a_tie(dtype):
    name = np.dtype(dtype).name.replace("float", "f")
    below = np.random.default_rng(1).uniform(1, 2, 1000).astype(dtype).astype(np.float64)
    ties = (below + np.nextafter(below.astype(dtype), dtype(2)).astype(np.float64)) / 2
    off = 1e-9 * ties
    outputs, expected = ((ties + by).astype(dtype).astype(np.float64) for by in (-off, off))
    error = np.abs(outputs - expected) / np.abs(expected)
    bound = Tolerance(rtol=2e-9).rounded_to(name).rtol
    assert error.max() <= bound < 2.01 * error.max()
    assert (error > bound / 2).any()  # one rounding would not do


def test_a_tolerance_finds_a_missing_term():
    x = np.random.default_rng(0).standard_normal((400, 4096))
    exact = x.sum(axis=1)
    error = np.abs(x[:, 1:].sum(axis=1) - exact).max() / np.abs(exact).max()
    assert error > 100 * Tolerance.of_sum("f32", 4096).rtol


def test_integers_allow_nothing():
    assert Tolerance.of_sum("u32", 1000) == Tolerance.of_sum("s32") == Tolerance()


@pytest.mark.parametrize(("dtype", "accumulator"), [("f8", "f32"), ("f32", "u32")])
def test_a_tolerance_of_an_unknown_type_is_refused(dtype, accumulator):
    with pytest.raises(PtxgenError, match=r"no tolerance for '(f8|u32)': f16, bf16, f32, f64"):
        Tolerance.of_sum(dtype, 10, accumulator)
    with pytest.raises(PtxgenError, match="no tolerance for 's32'"):
        Tolerance().rounded_to("s32")
