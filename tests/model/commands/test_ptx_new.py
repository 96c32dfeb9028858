"""`urdir ptx new`: the files of a new kernel work at once, and names that cannot be are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.driver.device import Device
from urdir.driver.harness import check_kernel
from urdir.ptxgen.catalog import kernel

Cli = Callable[..., tuple[int, str, str]]


def test_a_new_kernel_works(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urdir_emulator: Device
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # also restores what the catalog adds
    code, out, _ = cli("ptx", "new", "twice_2", "-o", "made")
    written = {path.relative_to(tmp_path) for path in Path(tmp_path, "made").rglob("*.*")}
    assert code == 0
    assert {Path(line) for line in out.splitlines()} == written
    assert {Path("made/twice_2/twice_2.ptx.j2"), Path("made/test_twice_2.py")} < written
    for path in written:
        assert not any(word in path.read_text() for word in ("scaled_sum", "ScaledSum"))
    monkeypatch.chdir("made")
    spec = kernel("twice_2.kernel:Twice2")
    assert spec.name == "twice_2"
    for example in spec.examples().values():
        check_kernel(urdir_emulator, example)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("add", "there is a kernel 'add' already"),
        ("json", "Python has a module 'json' already"),
        ("class", "'class' is not a name"),
        ("Scale", "'Scale' is not a name"),
        ("../up", "'../up' is not a name"),
        ("scale", "'scale' is a parameter's name"),
        ("a b", "'a b' is not a name"),
    ],
)
def test_names_that_cannot_be(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = cli("ptx", "new", name)
    assert code == 2
    assert message in err
    assert not [*tmp_path.iterdir()]


def test_nothing_is_overwritten(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("ptx", "new", "my_own", "-o", tmp_path)
    assert code == 2
    assert f"{tmp_path} exists" in err
