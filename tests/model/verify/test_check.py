"""`urdir check`: green where all is well, and red, by name, for everything that can be wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import urdir.model.data
from urdir.driver import bindings, execute
from urdir.driver.device_owner import DeviceOwner
from urdir.driver.errors import DriverError
from urdir.driver.ptx_files import PtxFiles
from urdir.driver.stream import Stream
from urdir.model.engine.engine import Engine
from urdir.model.families.config import Config
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.measure.model_kernels import model_kernels
from urdir.model.verify import check
from urdir.model.verify.check import CheckRow, check_kernel_examples, check_plans
from urdir.ptxgen.catalog import kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.spec import KernelSpec, smallest_example

Cli = Callable[..., tuple[int, str, str]]
EXAMPLE = Path(urdir.model.data.__file__).parent / "new_kernel"


@pytest.fixture
def owner() -> Iterator[DeviceOwner]:
    with DeviceOwner("emulator") as opened:
        yield opened


def open_demo(device: str, files: PtxFiles | None = None) -> Engine:
    return Engine.open(device=device, context=check.CONTEXT, cache_folder=None, ptx_files=files)


# ---- the command ----


def test_a_table_of_the_kernels_asked_for(cli: Cli) -> None:
    code, out, err = cli("check", "--kernel", "add", "--kernel", "normalise")
    assert code == 0
    lines = out.split("\n")
    assert lines[0].startswith("urdir check on emulator:sm_90a: ")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert rows[0] == ["what", "examples", "error", "of allowed", "us", "GB/s", ""]
    assert (rows[2][:2], rows[2][-1]) == (["add", "8"], "ok")
    assert (rows[3][0], rows[3][-1]) == ("normalise", "ok")
    assert float(rows[3][2]) > 0
    assert 0 <= int(rows[3][3].removesuffix("%")) <= 100
    assert lines[-2] == "32 ok, 0 failed, 0 skipped"
    assert "add (8 examples): ok" in err


def test_json_has_every_example(cli: Cli) -> None:
    code, out, _ = cli("check", "--kernel", "add", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["device"], report["target"], report["emulated"]) == (
        "emulator:sm_90a",
        "sm_90",
        True,
    )
    assert report["failed"] == 0
    assert [row["example"] for row in report["rows"]] == [
        str(spec) for spec in Add.examples().values()
    ]
    assert {row["status"] for row in report["rows"]} == {"ok"}
    assert report["rows"][0]["microseconds"] is None


@pytest.mark.slow
def test_the_device_can_be_chosen(cli: Cli) -> None:
    code, out, _ = cli("check", "--kernel", "select_keys", "--device", "emulator:sm_75", "--json")
    report = json.loads(out)
    assert (code, report["target"]) == (0, "sm_75")
    skipped = [row for row in report["rows"] if row["status"] == "skipped"]
    wanted = [s for s in kernel("select_keys").examples().values() if "sm_75" not in s.targets]
    assert wanted
    assert [row["example"] for row in skipped] == [str(spec) for spec in wanted]
    assert all("the device is sm_75" in row["skipped"] for row in skipped)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--kernel", "ad"), 2, "no kernel 'ad': did you mean add?"),
        (("--device", "gpu"), 2, "unknown device 'gpu'"),
        (("--device", "cuda:99", "--kernel", "add"), 1, "urdir: error: "),
        (("--kernel",), 2, "expected one argument"),
    ],
)
def test_bad_usage(cli: Cli, argv: tuple[str, ...], code: int, message: str) -> None:
    found, out, err = cli("check", *argv)
    assert (found, out) == (code, "")
    assert message in err


def test_a_failure_is_named_and_gives_exit_code_1(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_one(self: Add, **inputs: Any) -> dict[str, Any]:
        return {"y": inputs["a"] + inputs["b"] + np.float32(1)}

    monkeypatch.setattr(Add, "reference", off_by_one)
    code, out, err = cli("check", "--kernel", "rescale", "--kernel", "add")
    assert code == 1
    assert re.search(r"^\| rescale +\| +5 \|", out, re.MULTILINE)
    assert re.search(r"^\| add +\| +8 \|( +\|){4} FAILED \|$", out, re.MULTILINE)
    assert "FAILED Add(n=3, scale=1.0, scaled=False, width=0): kernel add: y[" in out
    assert "5 ok, 8 failed, 0 skipped" in out
    assert (
        "add (8 examples): FAILED\n  Add(n=3, scale=1.0, scaled=False, width=0): kernel add: y["
        in err
    )
    code, out, _ = cli("check", "--kernel", "add", "--json")
    report = json.loads(out)
    assert (code, report["failed"]) == (1, 8)
    assert {row["error"] for row in report["rows"]} == {None}


def test_an_override_takes_effect_and_the_report_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = smallest_example(Add)
    path = tmp_path / f"{spec.key('sm_90')}.ptx"
    path.write_text(spec.ptx("sm_90").replace("add.f32", "sub.f32"))
    (tmp_path / "add-sm_90-0000.ptx").write_text("stale")
    monkeypatch.setenv("URDIR_PTX_OVERRIDE", str(tmp_path))
    code, out, err = cli("check", "--kernel", "add")
    assert code == 1
    assert f"with edited PTX: {path.name}\n" in out
    assert f"FAILED {spec}: kernel add: y[" in out
    assert "7 ok, 1 failed, 0 skipped" in out
    assert f"{path} is used instead" in err
    assert err.count("were not used, such as add-sm_90-0000.ptx") == 1
    _, out, _ = cli("check", "--kernel", "add", "--json")
    assert json.loads(out)["edited_ptx"] == [path.name]


def test_a_folder_of_overrides_has_to_exist(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("URDIR_PTX_OVERRIDE", str(tmp_path / "absent"))
    code, out, err = cli("check", "--kernel", "add")
    assert (code, out) == (1, "")
    assert "urdir: error: PTX override: there is no folder" in err


@pytest.mark.slow
def test_a_kernel_of_another_package_is_found(tmp_path: Path) -> None:
    """As pip leaves it: the package, and an entry point in its metadata."""
    info = tmp_path / "scaled_sum-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scaled-sum\nVersion: 0.1.0\n")
    entry = "[urdir.kernels]\nscaled_sum = scaled_sum.kernel:ScaledSum\n"
    (info / "entry_points.txt").write_text(entry)
    assert 'scaled_sum = "scaled_sum.kernel:ScaledSum"' in (EXAMPLE / "pyproject.toml").read_text()
    path = [str(EXAMPLE), str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-m", "urdir.model", "check", "--kernel", "scaled_sum"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "URDIR_DEVICE": "emulator",
            "URDIR_CACHE_DIR": "",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| scaled_sum +\| +4 \|", done.stdout, re.MULTILINE)


# ---- kernels ----


def test_after_a_fault_the_others_are_still_checked(owner: DeviceOwner) -> None:
    owner.device.api.inject("launch", nth=2)
    rows = list(check_kernel_examples(owner, Add))
    assert [row.status for row in rows] == ["ok", "FAILED", *["ok"] * 6]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in rows[1].failure


def test_what_a_spec_raises_is_reported(
    owner: DeviceOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **inputs: Any) -> Any:
        raise ValueError("shapes (3,) and (4,)")

    monkeypatch.setattr(Add, "reference", fails)
    rows = list(check_kernel_examples(owner, Add))
    assert {row.failure for row in rows} == {"ValueError: shapes (3,) and (4,)"}
    monkeypatch.setattr(Add, "examples", fails)
    (row,) = check_kernel_examples(owner, Add)
    assert row == CheckRow("add", "examples()", failure="ValueError: shapes (3,) and (4,)")


def test_ptx_that_does_not_compile(owner: DeviceOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Add, "template", ("urdir.templates", "activate.ptx.j2"))
    rows = list(check_kernel_examples(owner, Add))
    assert [row.status for row in rows] == ["FAILED"] * 8


@pytest.fixture
def posing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulator in the place of the driver: everything takes it for a GPU."""
    monkeypatch.setattr(bindings, "real", lambda: bindings.emulated("sm_80"))


@pytest.mark.usefixtures("posing_gpu")
def test_on_a_gpu_the_table_has_times(cli: Cli) -> None:
    code, out, _ = cli("check", "--device", "cuda", "--kernel", "add", "--kernel", "advance")
    assert code == 0
    assert out.startswith("urdir check on cuda:0: urdir emulator (sm_80")
    assert ", driver for CUDA 13.0)\n" in out
    for name in ("add", "advance"):
        row = next(line for line in out.split("\n") if line.startswith(f"| {name} "))
        microseconds, gb_per_s = row.split("|")[5:7]
        assert float(microseconds) > 0
        assert float(gb_per_s) >= 0
    _, out, _ = cli("check", "--device", "cuda", "--kernel", "add", "--json")
    for row, spec in zip(json.loads(out)["rows"], Add.examples().values(), strict=True):
        moved = row["gb_per_s"] * 1e9 * row["microseconds"] * 1e-6
        assert moved == pytest.approx(spec.bytes_moved())


@pytest.mark.slow
@pytest.mark.usefixtures("posing_gpu", "one_step")
def test_a_gpu_is_compared_with_an_emulator_that_poses_as_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = check._check_emulator("twin", "cuda", open_demo)
    assert row == CheckRow("twin", error=0.0, tolerance=check.ROUNDING_TOLERANCE)
    right = check._decode

    def off(engine: Any, *args: Any) -> Any:
        tokens, logits = right(engine, *args)
        return tokens, logits * (1 if engine.device.is_emulated else 1.01)

    monkeypatch.setattr(check, "_decode", off)
    with pytest.raises(check.CheckError, match=r"logits differ by \d.\d\de-\d+ .*allowed 2e-03"):
        check._check_emulator("twin", "cuda", open_demo)


@pytest.mark.urdir_gpu
@pytest.mark.parametrize("kind", [Add, kernel("advance")], ids=lambda kind: kind.name)
def test_a_gpu_is_timed(kind: type[KernelSpec]) -> None:
    with DeviceOwner("cuda") as owner:
        rows = list(check_kernel_examples(owner, kind))
    assert {row.status for row in rows} == {"ok"}
    assert all(0 < (row.microseconds or 0) < 1e5 and row.gb_per_s for row in rows)


def test_kernels_are_selected_by_name() -> None:
    assert check.select_kernels(["add", "pack"]) == (Add, kernel("pack"))
    assert len(check.select_kernels()) > 15
    with pytest.raises(PtxgenError, match="no kernel 'nonsense'"):
        check.select_kernels(["add", "nonsense"])


# ---- plans ----


@pytest.fixture
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step after a prompt of few tokens."""
    monkeypatch.setattr(check, "STEPS", 1)
    monkeypatch.setattr(check, "PROMPT", "Once upon")


@pytest.mark.slow
@pytest.mark.usefixtures("one_step")
def test_plans_agree(device_name: str) -> None:
    rows = {row.name: row for row in check_plans(open_demo, device_name)}
    assert [row.failure for row in rows.values()] == ["", "", ""]
    launches, replay, emulator = rows.values()
    assert 0 < launches.error <= launches.tolerance
    assert (replay.error, replay.tolerance) == (0, 0)
    assert emulator.skipped == ("there is no GPU" if device_name == "emulator" else "")


@pytest.mark.slow
@pytest.mark.usefixtures("one_step")
def test_plans_run_edited_ptx(tmp_path: Path) -> None:
    with Gguf(demo_model()) as gguf:
        used = model_kernels(gguf, Config.of(gguf), check.CONTEXT, "sm_90a", sm_count=4)
    spec = next(kernel.spec for kernel in used if kernel.spec.name == "argmax")
    path = tmp_path / f"{spec.key('sm_90')}.ptx"
    path.write_text("// edited\n" + spec.ptx("sm_90"))
    lines: list[str] = []
    with PtxFiles(tmp_path, report=lines.append) as files:
        row = check._check_replay("replay", "emulator", partial(open_demo, files=files))
    assert row.status == "ok"
    assert files.used == (path.name,)
    assert len(lines) == 1
    path.write_text("no PTX")
    files = PtxFiles(tmp_path, report=lines.append)
    with pytest.raises(DriverError, match="compiling kernel argmax"):
        check._check_replay("replay", "emulator", partial(open_demo, files=files))


class Shortened:
    """Leaves out the last launches of a step."""

    def run(self, bound: execute.BoundPlan, stream: Stream) -> None:
        execute.run(bound, bound.device, stream, stop_after=len(bound) - 4)


@pytest.mark.slow
@pytest.mark.usefixtures("one_step")
def test_a_replay_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_Eager", Shortened)
    with pytest.raises(check.CheckError, match="replayed"):
        check._check_replay("replay", "emulator", open_demo)


@pytest.mark.slow
def test_a_launch_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GemmWgmma.reference

    def wrong(self: GemmWgmma, **inputs: Any) -> dict[str, Any]:
        outputs = right(self, **inputs)
        if self.steps.named("residual"):
            outputs["y"][1, 7] += 1
        return outputs

    monkeypatch.setattr(GemmWgmma, "reference", wrong)
    with pytest.raises(check.CheckError, match=r"attn_output \(gemm_wgmma\): y\[1, 7\] is "):
        check._check_launches("launches", "emulator", open_demo)


def open_ranks(device: str, gpus: Any) -> Engine:
    return Engine.open(device=device, gpus=gpus, context=check.CONTEXT, cache_folder=None)


@pytest.mark.full
@pytest.mark.slow
def test_gpus_agree_with_one(device_name: str, needs_gpus: Callable[[int], None]) -> None:
    needs_gpus(2)
    row = check.check_ranks(open_ranks, device_name, 2)
    assert (row.name, row.failure) == ("2 GPUs agree with one", "")
    assert 0 < row.error <= row.tolerance


@pytest.mark.parametrize(
    ("off", "message"),
    [
        ([1.0, 1.01, 1.01], r"GPUs 0, 3 decode .* GPU 0 alone .* differ by \d.\d\de-\d+"),
        ([1.0, 1.0, 1.01], "other logits when it runs again"),
    ],
)
def test_gpus_that_do_not_agree_are_named(
    off: list[float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors, logits = iter(off), np.linspace(-1, 1, 8, dtype=np.float32)
    monkeypatch.setattr(check, "_decode_in", lambda *_: ([1], logits * next(factors)))
    row = check.check_ranks(open_ranks, "emulator", (0, 3))
    assert re.search(message, row.failure)
    assert check.check_ranks(open_ranks, "cuda:99", 2).status == "FAILED"


def test_a_device_that_cannot_be_opened_fails_every_plan() -> None:
    rows = list(check_plans(open_demo, "cuda:99"))
    assert {row.status for row in rows} == {"FAILED"}
