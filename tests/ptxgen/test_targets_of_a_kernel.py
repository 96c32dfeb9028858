"""Kernels that exist for some targets only: their keys and PTX, and where they are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import PtxLoadError
from urdir.driver.harness import run_kernel
from urdir.model.verify.check import DeviceOwner, check_kernel_examples
from urdir.model.verify.kernel_suite import EmulatorSuite, check, skip_where_missing, targets, texts
from urdir.ptxgen import ptx
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.render.kernel import field_values
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, smallest_example
from urdir.ptxgen.tools.assemble import AssembleError, assemble, is_available
from urdir.ptxgen.tools.dump import Dump, description, ptx_text
from urdir.ptxgen.tools.gpus import GPUS
from urdir.ptxgen.tools.lint import lint
from urdir.ptxgen.tools.stats import measure

needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")

TEMPLATE = """\
// twice: y = 2 x
// x, y: (n) f32
// grid: one CTA of n threads
    .reg .b32 %i;
    .reg .b64 %offset;
    .reg .f32 %v;
{% if spec.uses_setmaxnreg %}
    setmaxnreg.dec.sync.aligned.u32 24;
{% endif %}
    mov.u32 %i, %tid.x;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %x, %x, %offset;
    add.u64 %y, %y, %offset;
    ld.global.f32 %v, [%x];
    add.f32 %v, %v, %v;
    st.global.f32 [%y], %v;
    ret;
"""


@dataclass(frozen=True)
class Twice(KernelSpec):
    """Doubles every value, on Hopper alone."""

    n: int = 128
    #: An instruction that no portable target has.
    uses_setmaxnreg: bool = False

    name = "twice"
    template = ("urdir_test_targets", "twice.ptx.j2")

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_90a",)

    @property
    def params(self) -> tuple[Param, ...]:
        return (Param("x", "f32", ("n",), Access.IN), Param("y", "f32", ("n",), Access.OUT))

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape((1, 1, 1), (self.n, 1, 1), resident=1)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"y": (2 * inputs["x"]).astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, Twice]:
        return {"one": cls()}

    def flops(self) -> int:
        return self.n


@dataclass(frozen=True)
class Both(Twice):
    """The same with a form of its own for Hopper."""

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_80", "sm_90", "sm_90a")


@pytest.fixture(autouse=True)
def _template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "urdir_test_targets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "twice.ptx.j2").write_text(TEMPLATE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("spec", "device", "target"),
    [
        (Twice(), "sm_90a", "sm_90a"),
        (Twice(), "sm_90", None),
        (Twice(), "sm_100", None),
        (Twice(), "sm_100a", None),
        (Both(), "sm_90a", "sm_90a"),
        (Both(), "sm_90", "sm_90"),
        (Both(), "sm_86", None),
        (Add(n=5), "sm_90a", "sm_90"),
        (Add(n=5), "sm_120a", "sm_120"),
        (Add(n=5), "sm_75", "sm_75"),
    ],
)
def test_the_target_on_a_device(spec: KernelSpec, device: str, target: str | None) -> None:
    assert spec.target_on(device) == target


def test_an_unknown_device_is_no_device_without_the_kernel() -> None:
    with pytest.raises(PtxgenError, match="unknown target 'sm_12'"):
        Twice().target_on("sm_12")


@pytest.mark.parametrize("device", ["sm_75", "sm_90", "sm_100", "sm_120a"])
def test_it_is_refused_by_name_elsewhere(device: str) -> None:
    message = rf"^kernel twice is for sm_90a, not {device}$"
    with pytest.raises(PtxgenError, match=message):
        Twice().ptx(device)
    with pytest.raises(PtxgenError, match=message):
        Twice().key(device)


def test_targets_are_no_part_of_fields_and_keys() -> None:
    @dataclass(frozen=True)
    class Everywhere(Add):
        """As it is, but of this module, whose digest is in the key."""

    @dataclass(frozen=True)
    class Fewer(Add):
        targets = ("sm_80", "sm_90")  # type: ignore[assignment]

    for device in ("sm_80", "sm_90", "sm_90a"):
        assert Fewer(n=5).key(device) == Everywhere(n=5).key(device)
    assert field_values(Fewer(n=5)) == field_values(Everywhere(n=5))


def test_kernels_that_exist_everywhere_have_one_key_and_text_for_both_names() -> None:
    specs = [smallest_example(kind) for kind in kernels().values()]
    for spec in (
        spec for spec in specs if "sm_90" in spec.targets and "sm_90a" not in spec.targets
    ):
        assert spec.key("sm_90a") == spec.key("sm_90")
        assert spec.key("sm_90").startswith(f"{spec.name}-sm_90-")
        names = {f.name for f in dataclasses.fields(spec)}  # type: ignore[arg-type]
        assert field_values(spec).keys() == names
        assert "targets" not in names
    assert Add(n=5).ptx("sm_90a") == Add(n=5).ptx("sm_90")
    assert Both().key("sm_90a") != Both().key("sm_90")


@pytest.mark.parametrize("spec", [Twice(), Twice(uses_setmaxnreg=True)], ids=str)
def test_its_text(spec: Twice) -> None:
    text = spec.ptx("sm_90a")
    module = ptx.parse(text)
    assert (module.target, module.version) == ("sm_90a", (8, 0))
    assert lint(text) == ()
    assert targets(spec) == ["sm_90a"]
    assert texts(spec) == {"sm_90a": text}
    assert spec.key("sm_90a").startswith("twice-sm_90a-")


@needs_assembler
def test_its_machine_code() -> None:
    spec = Twice(uses_setmaxnreg=True)
    made = assemble(spec.ptx("sm_90a"), "sm_90a")
    assert not made.entries["twice"].spills
    for other in ("sm_90", "sm_100"):
        with pytest.raises(AssembleError, match=f"does not assemble for {other}"):
            assemble(spec.ptx("sm_90a"), other)
    stats = measure(spec, "sm_90a", GPUS["h200"], spec.ptx("sm_90a"), made)
    assert stats.occupancy is not None
    assert (stats.occupancy.ctas, stats.mix["control"]) == (16, 4)


def test_its_dump() -> None:
    dump = Dump(Twice(), "sm_90a", "as the test has them")
    assert dump.key in ptx_text(dump)
    found = json.loads(json.dumps(description(dump)))
    assert (found["target"], found["key"]) == ("sm_90a", Twice().key("sm_90a"))


def test_a_suite_runs_it_where_it_exists() -> None:
    class Suite(EmulatorSuite):
        kernels = (Twice, Both, Add)

    cases = Suite.on_other_targets()
    assert [case.id for case in cases] == [
        "twice-sm_80", "twice-sm_90", "add-sm_75", "add-sm_80"
    ]  # fmt: skip
    Suite().test_it_runs_on_another_target(*cases[0].values)


def test_it_runs_where_it_exists() -> None:
    with Device.open("emulator:sm_90a") as device:
        for spec in (Twice(), Both(), Add(n=5)):
            check(device, spec, spec.make_inputs(np.random.default_rng(3)))


@pytest.mark.urdir_gpu
@pytest.mark.sanitizer
def test_it_runs_on_a_gpu_that_has_it(urdir_gpu: Device) -> None:
    """The driver compiles it for the accelerated target, and other kernels as before."""
    spec = Twice()
    skip_where_missing(spec, urdir_gpu.native_target)
    check(urdir_gpu, spec, spec.make_inputs(np.random.default_rng(3)))
    assert urdir_gpu.target == "sm_90"


def test_it_is_refused_where_it_does_not() -> None:
    with Device.open("emulator:sm_90") as device:
        inputs = Twice().make_inputs(np.random.default_rng(3))
        with pytest.raises(PtxgenError, match="kernel twice is for sm_90a, not sm_90"):
            run_kernel(device, Twice(), inputs)
        check(device, Both(), inputs)
        with pytest.raises(PtxLoadError, match="for sm_90a, which the device"):
            device.compile(Twice().ptx("sm_90a"), "twice")


def test_checks_leave_it_out_elsewhere() -> None:
    for name, status in (("sm_90", "skipped"), ("sm_80", "skipped"), ("sm_90a", "ok")):
        with DeviceOwner(f"emulator:{name}") as owner:
            (row,) = check_kernel_examples(owner, Twice)
        assert row.status == status
        assert row.skipped in ("", f"is for sm_90a, the device is {name}")
    skip_where_missing(Twice(), "sm_90a")
    with pytest.raises(pytest.skip.Exception, match="twice is for sm_90a, this is sm_90"):
        skip_where_missing(Twice(), "sm_90")
