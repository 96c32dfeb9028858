"""Template lines beside PTX lines: right ones, in messages of the assembler and of the emulator."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import urdir.model.data
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, PtxLoadError
from urdir.driver.harness import check_kernel
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.ptx.origin import origins
from urdir.ptxgen.render.sources import TEMPLATES, read_template
from urdir.ptxgen.spec import KernelSpec, smallest_example
from urdir.ptxgen.tools.check import check

MODEL = Path(urdir.model.data.__file__).parent / "new_kernel"
NUMBERS = itertools.count()
LOAD = "    ld.global.f32 %value, [%at];\n"

Plant = Callable[[str, str], tuple[KernelSpec, str]]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """``plant(old, new)``: a kernel with another text in its template, and the place of that."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(MODEL)
    kind = importlib.import_module("scaled_sum.kernel").ScaledSum
    template = (MODEL / "scaled_sum" / "scaled_sum.ptx.j2").read_text()

    def make(old: str, new: str) -> tuple[KernelSpec, str]:
        assert template.count(old) == 1
        package = f"lines_{next(NUMBERS)}"
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "body.ptx.j2").write_text(template.replace(old, new))
        line = template[: template.index(old)].count("\n") + 1
        spec = dataclasses.replace(
            type("Planted", (kind,), {"template": (package, "body.ptx.j2")})(3, 70)
        )
        return spec, f"{package}/body.ptx.j2:{line}"

    return make


@pytest.mark.parametrize("kernel", [Add, Argmax, GemmSmall])
def test_a_line_is_that_of_its_template(kernel: type[KernelSpec]) -> None:
    text = smallest_example(kernel).ptx("sm_90")
    places = origins(text)
    assert len(places) == len(text.split("\n"))
    found = [(line, place) for line, place in zip(text.split("\n"), places, strict=True) if place]
    body = [line for line in text.split("\n{\n")[1].split("\n") if line.strip()]
    assert len(found) > 0.6 * len(body)
    for line, place in found:
        file, _, number = place.rpartition(":")
        source = read_template((TEMPLATES, file)).split("\n")[int(number) - 1]
        literal = [part.strip() for part in re.split(r"\{\{.*?\}\}|\{%.*?%\}", source)]
        assert any(part and part in line for part in literal), (line, place)


def test_a_text_of_nobody_has_no_places() -> None:
    assert not origins(smallest_example(Add).ptx("sm_90") + "\n")


def test_lint_and_assembler_name_the_place(plant: Plant) -> None:
    spec, place = plant(LOAD, "    add.f32 %value, %value, %nothing;\n")
    verdict = str(check(spec.ptx("sm_90"), "sm_90"))
    assert re.search(rf"> +\d+ \| .*%nothing;  <- {re.escape(place)}", verdict)


def test_the_driver_names_the_place(plant: Plant, urdir_emulator: Device) -> None:
    spec, place = plant(LOAD, "    add.f32 %value, %value, %nothing;\n")
    with pytest.raises(PtxLoadError, match=rf"%nothing;  <- {re.escape(place)}"):
        urdir_emulator.load(spec)


def test_a_fault_names_the_place_also_of_a_cached_kernel(plant: Plant, tmp_path: Path) -> None:
    spec, place = plant(LOAD, LOAD.replace("[%at]", "[%at + 2]"))
    for _ in range(2):
        with (
            pytest.raises(CudaError, match=rf"PTX line \d+, {re.escape(place)} \(ld.global"),
            Device.open("emulator", cache_folder=tmp_path / "cache") as device,
        ):
            check_kernel(device, spec)
