"""The pytest plugin, in test runs of its own: what it offers, and that it stays out of the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from urdir.driver.device import Device
from urdir.driver.device_owner import DeviceOwner
from urdir.driver.errors import CudaError
from urdir.driver.harness import check_kernel
from urdir.ptxgen.kernels.add import Add

pytest_plugins = ("pytester",)

#: A conftest that makes the probe find something else than the machine has.
PROBE = """
from urdir.driver import pytest_plugin
from urdir.driver.device import Probe
from urdir.driver.errors import NoDeviceError

pytest_plugin.find_gpu = lambda: Probe({status!r}, {detail!r}, error={error})
"""
ABSENT = PROBE.format(
    status="no device", detail="no GPU here", error="NoDeviceError('no GPU here')"
)
BROKEN = PROBE.format(status="error", detail="the GPU is ill", error="NoDeviceError('ill')")
FOUND = PROBE.format(status="ok", detail="cuda:0 Some GPU", error=None)


class Run:
    """Runs pytest on files, in a process that has the plugin and no other."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester

    def __call__(self, test: str, *options: str, conftest: str = ABSENT) -> pytest.RunResult:
        self.pytester.makeconftest(conftest)
        self.pytester.makepyfile(test)
        return self.pytester.runpytest_subprocess("-p", "urdir.driver.pytest_plugin", *options)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # installed, it would load twice
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return Run(pytester)


# ---- staying out of the way ----


def test_a_run_that_does_not_use_it_pays_nothing(run: Run) -> None:
    result = run(
        """
        import sys

        def test_nothing_is_imported():
            loaded = {name for name in sys.modules if name.startswith("urdir.")}
            assert loaded == {"urdir.driver", "urdir.driver.pytest_plugin"}
            assert not {"numpy", "cuda", "jinja2"} & set(sys.modules)
        """,
        conftest="",
    )
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*urdir:*")


@pytest.mark.slow
def test_all_its_names_are_prefixed(run: Run) -> None:
    run.pytester.makepyfile("def test(): pass")
    arguments = ("-p", "urdir.driver.pytest_plugin", "--fixtures", "-v")
    fixtures = run.pytester.runpytest_subprocess(*arguments).stdout.str()
    ours = [line.split()[0] for line in fixtures.split("\n") if "pytest_plugin.py:" in line]
    assert len(ours) == 8
    assert all(name.lstrip("_").startswith("urdir_") for name in ours)
    plugin_help = run.pytester.runpytest_subprocess("-p", "urdir.driver.pytest_plugin", "--help")
    plugin_help.stdout.fnmatch_lines(["  --urdir-require-gpu*", "  urdir_header (bool)*"])


def test_its_marker_is_declared(run: Run) -> None:
    test = "import pytest\n@pytest.mark.urdir_gpu\ndef test(): pass"
    run(test, "--strict-markers").assert_outcomes(skipped=1)


def test_another_projects_gpu_marker_is_its_own(run: Run) -> None:
    test = "import pytest\n@pytest.mark.gpu\ndef test(): pass"
    run(test, "-o", "markers=gpu: theirs", "--strict-markers").assert_outcomes(passed=1)


# ---- the GPU ----

MARKED = """
import pytest

@pytest.fixture
def made():
    raise AssertionError("made without a GPU")

@pytest.mark.urdir_gpu
def test_marked(made): ...

def test_by_fixture(urdir_gpu): ...

def test_unmarked(): ...
"""


def test_no_gpu_skips_and_says_so(run: Run) -> None:
    result = run(MARKED, "-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["urdir: no GPU here", "SKIPPED*no GPU here"])


@pytest.mark.slow
def test_no_gpu_fails_where_one_is_required(run: Run) -> None:
    result = run(MARKED, "--urdir-require-gpu")
    result.assert_outcomes(passed=1, failed=0, errors=2)
    result.stdout.fnmatch_lines(["urdir: no GPU here", "no GPU here"])


@pytest.mark.slow
def test_a_gpu_that_fails_is_no_reason_to_skip(run: Run) -> None:
    result = run(MARKED, conftest=BROKEN)
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*the GPU is ill*"])


@pytest.mark.slow
def test_the_header_names_the_gpu_where_it_is_asked_for(run: Run) -> None:
    test = "def test(): pass"
    run(test, conftest=FOUND).stdout.no_fnmatch_line("urdir: *")
    result = run(test, "-o", "urdir_header=true", conftest=FOUND)
    assert result.outlines.count("urdir: cuda:0 Some GPU") == 1
    result = run(MARKED, "-o", "urdir_header=true")
    assert result.outlines.count("urdir: no GPU here") == 1


@pytest.mark.slow
def test_the_probe_is_looked_up_once(run: Run) -> None:
    result = run(
        MARKED + "\ndef test_device(urdir_device): ...",
        conftest="""
        import urdir.driver.device
        from urdir.driver.errors import NoDeviceError

        def probe(api=None):
            with open("probed", "a") as file:
                file.write("probed ")
            return urdir.driver.device.Probe("no device", "none", error=NoDeviceError("none"))

        urdir.driver.device.probe = probe
        """,
    )
    result.assert_outcomes(passed=2, skipped=2)
    assert (run.pytester.path / "probed").read_text() == "probed "


def test_the_shared_gpu_is_opened_once_and_again_after_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Device] = []
    open_device = Device.open

    def open_emulator(name: str, **options: Any) -> Device:
        assert name == ("emulator:sm_90a" if opened else "cuda")  # as it calls itself
        opened.append(open_device("emulator"))
        return opened[-1]

    monkeypatch.setattr(Device, "open", open_emulator)
    shared = DeviceOwner("cuda")
    first = shared.device
    assert shared.device is first
    first.api.inject("launch")
    with pytest.raises(CudaError):
        check_kernel(first, Add(n=8))
    second = shared.device
    assert second is not first
    check_kernel(second, Add(n=8))
    shared.close()
    assert len(opened) == 2


# ---- the other fixtures ----


@pytest.mark.slow
def test_a_device_is_of_either_kind(run: Run) -> None:
    test = """
    def test_it(urdir_device, urdir_stream):
        assert urdir_stream.device is urdir_device
        with urdir_device.allocate(4, "x") as buffer:
            buffer.fill(1, urdir_stream)
            assert buffer.download("u1").tolist() == [1] * 4
    """
    run(test).assert_outcomes(passed=1)
    collected = run(test, "--collect-only", "-q", conftest=FOUND)
    names = [line.partition("::")[2] for line in collected.outlines if "::" in line]
    assert names == ["test_it[emulator]", "test_it[cuda]"]
    only_gpu = run(test, "--collect-only", "-q", "-m", "urdir_gpu", conftest=FOUND)
    only_gpu.stdout.fnmatch_lines(["*test_it?cuda?"])
    run(test, "--urdir-require-gpu").assert_outcomes(passed=1, errors=1)


@pytest.mark.slow
def test_every_test_has_an_emulator_of_its_own(run: Run) -> None:
    result = run(
        """
        import pytest

        @pytest.mark.parametrize("time", [1, 2])
        def test_it(time, urdir_emulator):
            free, total = urdir_emulator.memory_info()
            assert free == total
            urdir_emulator.allocate(1 << 20, "left behind")
        """
    )
    result.assert_outcomes(passed=2)


@pytest.mark.slow
def test_the_sanitizer_is_on_where_asked_for(run: Run) -> None:
    result = run(
        """
        def test_it(urdir_sanitizer, urdir_emulator):
            assert urdir_sanitizer.is_emulated
            assert urdir_sanitizer.api is not urdir_emulator.api
        """
    )
    result.assert_outcomes(passed=1)


@pytest.mark.slow
def test_injected_faults(run: Run) -> None:
    result = run(
        """
        import pytest
        from urdir.driver import OutOfMemoryError

        def test_the_second_allocation_fails(urdir_emulator, urdir_faults):
            urdir_faults("allocation", nth=2)
            urdir_emulator.allocate(4, "first")
            with pytest.raises(OutOfMemoryError):
                urdir_emulator.allocate(4, "second")

        def test_that_never_gets_there(urdir_emulator, urdir_faults):
            urdir_faults("allocation")
            urdir_faults("instantiate")
        """
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*injected, but never occurred: allocation, instantiate*"])


# ---- registering ----


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_our_own_conftest_registers_it_once(
    run: Run, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the source tree, and beside an installed urdir with its entry point."""
    folder = run.pytester.mkdir("site")
    if installed:
        monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        info = folder / "urdir-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: urdir\nVersion: 9.9\n")
        entry = "[pytest11]\nurdir = urdir.driver.pytest_plugin\n"
        (info / "entry_points.txt").write_text(entry)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    run.pytester.makeconftest((Path(__file__).parent.parent / "conftest.py").read_text())
    run.pytester.makepyfile(
        """
        def test_it(emulator, pytestconfig):
            markers = pytestconfig.getini("markers")
            assert sum(line.startswith("urdir_gpu:") for line in markers) == 1
        """
    )
    result = run.pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


@pytest.mark.full  # .ci/run runs pytest -W error beside the wheel
@pytest.mark.slow
def test_a_project_beside_an_installed_urdir_has_no_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest marks modules for rewriting by the names of a distribution's files: none of them is
    imported before, and none is the project's."""
    pytest.importorskip("setuptools", "77")
    site = run.pytester.mkdir("site")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(site)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True)
    info = site / "urdir-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: urdir\nVersion: 9.9\n")
    entry = "[pytest11]\nurdir = urdir.driver.pytest_plugin\n"
    (info / "entry_points.txt").write_text(entry)
    files = [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()]
    assert "urdir/__main__.py" in files
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    own = run.pytester.mkdir("own")
    (own / "model.py").write_text("")  # imported by a plugin, before modules are marked
    (own / "early.py").write_text("import model\n")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(own), *sys.path]))
    path = run.pytester.makepyfile("def test_it(urdir_emulator): assert urdir_emulator")
    result = run.pytester.runpytest_subprocess(
        "-W", "error", "-p", "no:cacheprovider", "-p", "early", path
    )
    result.assert_outcomes(passed=1)
