"""Finding kernels: built-in ones by walking, others by entry point."""

import dataclasses
import importlib.metadata

import pytest

from urdir.ptxgen import catalog
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.normalise import Normalise


@dataclasses.dataclass(frozen=True)
class Outside(Add):
    """A kernel of another package."""

    name = "outside"


@dataclasses.dataclass(frozen=True)
class Impostor(Add):
    """A kernel with the name of another one."""


def announce(monkeypatch, *values: str) -> None:
    points = [
        importlib.metadata.EntryPoint(name=f"k{i}", value=v, group=catalog.ENTRY_POINTS)
        for i, v in enumerate(values)
    ]

    def entry_points(*, group: str):
        assert group == "urdir.kernels"
        return points

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def resolve(monkeypatch, **names: object) -> None:
    """``outside:NAME`` loads these objects."""
    monkeypatch.setattr(
        importlib.metadata.EntryPoint, "load", lambda point: names[point.value.split(":")[1]]
    )


def test_the_built_in_kernels_are_found():
    found = catalog.kernels()
    assert found["add"] is Add
    assert found["normalise"] is Normalise
    assert {"activate", "argmax", "advance"} <= set(found)
    assert list(found) == sorted(found)


def test_bases_of_several_kernels_are_none():
    assert all(hasattr(spec, "template") for spec in catalog.kernels().values())
    assert "Elementwise" not in {spec.__name__ for spec in catalog.kernels().values()}


def test_one_kernel_by_name():
    assert catalog.kernel("add") is Add
    with pytest.raises(PtxgenError, match="no kernel 'ad': did you mean add"):
        catalog.kernel("ad")


def test_other_packages_announce_theirs(monkeypatch):
    announce(monkeypatch, "outside:Outside")
    resolve(monkeypatch, Outside=Outside)
    assert catalog.kernels()["outside"] is Outside


def test_two_kernels_of_one_name(monkeypatch):
    announce(monkeypatch, "outside:Impostor")
    resolve(monkeypatch, Impostor=Impostor)
    with pytest.raises(PtxgenError, match=r"two kernels are called 'add': .*\.Add, .*\.Impostor"):
        catalog.kernels()


def test_an_entry_point_that_is_no_kernel(monkeypatch):
    announce(monkeypatch, "outside:text")
    resolve(monkeypatch, text="text")
    with pytest.raises(PtxgenError, match="k0 = 'outside:text' is not a kernel spec"):
        catalog.kernels()


def test_an_entry_point_that_does_not_load(monkeypatch):
    announce(monkeypatch, "no_such_package:Kernel")
    with pytest.raises(PtxgenError, match=r"k0 = 'no_such_package:Kernel'.*No module named"):
        catalog.kernels()
