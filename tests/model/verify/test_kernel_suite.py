"""The suite that anybody's kernel gets: it passes a right kernel, and finds every planted bug."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import urdir.model.data
from urdir.driver.device import Device
from urdir.model.commands.ptx import new
from urdir.model.verify.kernel_suite import KernelSuite, texts
from urdir.ptxgen.spec import KernelSpec, LaunchShape, Tolerance, smallest_example
from urdir.ptxgen.tools.assemble import is_available

EXAMPLE = Path(urdir.model.data.__file__).parent / "new_kernel"
TEMPLATE = (EXAMPLE / "scaled_sum" / "scaled_sum.ptx.j2").read_text(encoding="utf-8")
SUITE = KernelSuite()
NUMBERS = itertools.count()

needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")


@pytest.fixture
def scaled_sum(monkeypatch: pytest.MonkeyPatch) -> type[KernelSpec]:
    """The spec of the example package."""
    monkeypatch.syspath_prepend(EXAMPLE)
    kind: type[KernelSpec] = importlib.import_module("scaled_sum.kernel").ScaledSum
    return kind


@pytest.fixture
def plant(
    scaled_sum: type[KernelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., KernelSpec]:
    """``plant(old, new, **attributes)``: the example with a bug in its template or its spec."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(old: str = "", new: str = "", **attributes: Any) -> KernelSpec:
        assert old in TEMPLATE
        package = f"planted_{next(NUMBERS)}"
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        text = TEMPLATE.replace(old, new) if old else TEMPLATE
        (tmp_path / package / "body.ptx.j2").write_text(text)
        attributes["template"] = (package, "body.ptx.j2")
        return dataclasses.replace(type("Planted", (scaled_sum,), attributes)(3, 70))

    return make


# ---- bugs in the text ----


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    mov.f32 %sum, {{ f32(0) }};\n", "", "read-before-write: .*%sum"),
        (".reg .f32 %sum, %value;", ".reg .b32 %sum; .reg .f32 %value;", "float-on-bits"),
        (".reg .b64 %at, %offset;", ".reg .b64 %at, %offset, %spare;", "unused-register: .*%spare"),
        ("ADDED:\n", "ADDED:\nUNUSED:\n", "unused-label: .*UNUSED"),
        ("    ret;\n", "", "missing-ret"),
        ("    ret;\n", "    ret;\n    mov.f32 %sum, %value;\n", "unreachable"),
        (
            "    @%first st.global.f32 [%at], %sum;\n",
            "    @!%first bra OUT;\n    bar.sync 0;\n    st.global.f32 [%at], %sum;\nOUT:\n",
            "divergent-barrier",
        ),
        ("bra NEXT;", "bra NEXTT;", "syntax: .*NEXTT"),
        ("%lane, %tid.x", "%lan, %tid.x", "syntax: .*%lan"),
        (".b32 %lane,", ".b32 %laneid, %lane,", "syntax: .*%laneid"),
    ],
)
def test_lint_finds(plant: Any, old: str, new: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        SUITE.test_lint_finds_nothing(plant(old, new))


@needs_assembler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add.f32 %sum, %sum, %value;", "add.f32 %sum, %sum, %at;"),
        ("mul.wide.u32 %offset, %lane", "mul.lo.u32 %offset, %lane"),
        ("shfl.sync.bfly.b32", "shfl.sync.butterfly.b32"),
    ],
)
def test_the_assembler_finds(plant: Any, old: str, new: str) -> None:
    with pytest.raises(Exception, match=r"(?s)scaled_sum does not assemble for sm_75.*> +\d+ \|"):
        SUITE.test_it_assembles_without_spills(plant(old, new))


def test_a_wait_is_where_it_is_promised(plant: Any) -> None:
    """The frame puts it there for a spec that promises it, unless the template has its own."""
    wait = "{% if target.sm >= 90 %}\n    griddepcontrol.wait;\n{% endif %}\nADDED:\n"
    SUITE.test_the_parameter_list_is_the_specs(plant(waits_for_dependencies=True))
    SUITE.test_the_parameter_list_is_the_specs(plant(waits_for_dependencies=False))
    SUITE.test_the_parameter_list_is_the_specs(plant("ADDED:\n", wait))
    with pytest.raises(AssertionError, match=r"sm_120: griddepcontrol.wait is there"):
        SUITE.test_the_parameter_list_is_the_specs(
            plant("ADDED:\n", wait, waits_for_dependencies=False)
        )


def test_an_instruction_that_a_target_lacks(plant: Any) -> None:
    bug = plant("    ret;\n", "    griddepcontrol.launch_dependents;\n    ret;\n")
    with pytest.raises(Exception, match="sm_90"):
        SUITE.test_lint_finds_nothing(bug)


# ---- bugs that show when it runs ----


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "%more, %col, {{ cols }}",
            "%more, %col, {{ cols + 1 }}",
            "ILLEGAL_ADDRESS|is .* reference",
        ),
        ("%more, %col, {{ cols }}", "%more, %col, {{ cols - 1 }}", "3 of 3 wrong"),
        ("(16, 8, 4, 2, 1)", "(16, 8, 4, 2)", "3 of 3 wrong"),
        ("    mul.f32 %sum, %sum, %scale;\n", "", "3 of 3 wrong"),
        ("{{ 4 * cols }}, %x", "{{ cols }}, %x", "2 of 3 wrong|MISALIGNED"),
        ("%first, %lane, 0", "%first, %row, 0", r"y\[1\] is nan.*2 of 3 wrong"),
        (
            "mul.wide.u32 %offset, %row, 4",
            "mul.wide.u32 %offset, %row, 8",
            "wrote beside its output y",
        ),
        ("[%at], %sum", "[%at+-4], %sum", r"wrote beside its output y \(3,\): at byte -4"),
        ("add.u64 %at, %y, %offset", "add.u64 %at, %x, %offset", "changed its input x at byte 0"),
        ("[%at], %sum", "[%at+2], %sum", "MISALIGNED"),
        ("add.u64 %at, %at, 128", "add.u64 %at, %at, 1280000", "ILLEGAL_ADDRESS"),
        ("    add.u32 %col, %col, 32;\n", "", "ILLEGAL_ADDRESS"),
    ],
)
def test_the_emulator_finds(
    plant: Any, old: str, new: str, message: str, urdir_emulator: Device
) -> None:
    with pytest.raises(Exception, match=message):
        SUITE.test_it_agrees_with_its_reference(plant(old, new), urdir_emulator)


def test_the_sanitizer_finds_a_race(
    plant: Any, urdir_emulator: Device, urdir_sanitizer: Device
) -> None:
    """Every lane writes, the one that should do so last: right by chance."""
    store = "    @%first st.global.f32 [%at], %sum;\n"
    all_lanes = "    cvt.rn.f32.u32 %value, %lane;\n    st.global.f32 [%at], %value;\n"
    bug = plant(store, all_lanes + store)
    SUITE.test_it_agrees_with_its_reference(bug, urdir_emulator)
    with pytest.raises(Exception, match=r"kernel scaled_sum: .*race"):
        SUITE.test_the_sanitizer_finds_nothing(bug, urdir_sanitizer)


def test_a_tolerance_of_zero_is_kept(plant: Any, urdir_emulator: Device) -> None:
    with pytest.raises(Exception, match="allowed 0 "):
        SUITE.test_it_agrees_with_its_reference(plant(tolerance=Tolerance()), urdir_emulator)


def test_a_block_of_another_size(plant: Any, urdir_emulator: Device) -> None:
    narrow = plant(launch_shape=LaunchShape((3, 1, 1), (16, 1, 1)))
    with pytest.raises(Exception, match=r"3 of 3 wrong"):
        SUITE.test_it_agrees_with_its_reference(narrow, urdir_emulator)


# ---- bugs in the spec ----


def _reference_in_double(self: Any, **inputs: Any) -> dict[str, Any]:
    return {"y": inputs["x"].sum(axis=1, dtype=np.float64) * inputs["scale"]}


def _reference_that_scribbles(self: Any, **inputs: Any) -> dict[str, Any]:
    inputs["x"] *= inputs["scale"]
    return {"y": inputs["x"].sum(axis=1)}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"reference": _reference_in_double}, "reference of .*float64"),
        ({"reference": _reference_that_scribbles}, "the reference changed its input"),
        ({"reference": lambda self, **inputs: {}}, "reference of .* gives {}"),
        ({"make_inputs": lambda self, rng: {}}, "make_inputs of .* gives {}"),
    ],
)
def test_arrays_that_are_not_as_declared(plant: Any, attributes: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        SUITE.test_inputs_and_reference_have_the_declared_shapes(plant(**attributes))


def test_costs_that_make_no_sense(plant: Any) -> None:
    for attributes in ({"bytes_moved": lambda self: 0}, {"flops": lambda self: -1}):
        with pytest.raises(AssertionError, match=r"moves no bytes|has -1 operations"):
            SUITE.test_costs_are_given(plant(**attributes))


def test_a_suite_without_kernels_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="KernelSuite: set kernels"):
        SUITE.pytest_generate_tests(None)  # type: ignore[arg-type]


# ---- right kernels ----


def test_texts_are_those_that_differ(scaled_sum: type[KernelSpec]) -> None:
    assert list(texts(smallest_example(scaled_sum))) == [
        "sm_120",
        "sm_89",
    ]  # with and without waiting


def run_pytest(folder: Path, *options: str, path: tuple[Path, ...] = ()) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "urdir.driver.pytest_plugin")
    done = subprocess.run(
        [sys.executable, *command, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_new_kernel_passes(tmp_path: Path) -> None:
    new.write("my_kernel", tmp_path / "copy")
    report = run_pytest(tmp_path / "copy", "-m", "not urdir_gpu", path=(tmp_path / "copy",))
    passed = 26 if not is_available() else 30
    assert f"{passed} passed" in report
    assert "12 deselected" in report  # what a GPU would run
