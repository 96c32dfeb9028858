"""`urdir ptx` as a user types it, with good and bad input."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.model.commands import table
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.spec import smallest_example
from urdir.ptxgen.tools import assemble as assembler
from urdir.ptxgen.tools.assemble import AssemblerMissingError, is_available
from urdir.ptxgen.tools.dump import body_of

Cli = Callable[..., tuple[int, str, str]]
needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")


@pytest.fixture
def nano(data: Path) -> Path:
    return data / "golden" / "nano-llama-q8_0.gguf"


def test_list_has_every_kernel_with_its_fields(cli: Cli) -> None:
    code, out, _ = cli("ptx", "list", "--json")
    found = {entry["kernel"]: entry for entry in json.loads(out)}
    assert code == 0
    assert found.keys() == kernels().keys()
    fields = {field["name"]: field for field in found["gemv_f32"]["fields"]}
    assert fields["batch"]["default"] == 1
    assert "activations" not in fields
    integer = {field["name"]: field for field in found["gemv"]["fields"]}
    assert integer["options.sms"]["default"] == 132
    assert integer["options.shared"]["default"] == 64 * 1024
    assert "batch" not in integer
    assert "default" not in fields["rows"]
    assert "Q4_K" in fields["format"]["type"]
    text = cli("ptx", "list")[1]
    for name, entry in found.items():
        assert f"{name}  {entry['purpose']}" in text
    assert cli("ptx", "list", "prepare_tokens")[1].startswith("prepare_tokens  ")


def test_list_has_the_operations_of_a_step(cli: Cli, nano: Path) -> None:
    code, out, _ = cli("ptx", "list", "--model", nano, "--graph")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("token_embd: embed")
    assert lines[-1].startswith("output: product normed (1, ")
    assert any(line.startswith("blk.1.attention: attend q (1, ") for line in lines)
    assert cli("ptx", "list", "--graph")[0] == 2
    assert cli("ptx", "list", "--model", nano, "--graph", "--json")[0] == 2


def test_list_of_a_model_says_what_its_steps_launch(cli: Cli, nano: Path) -> None:
    code, out, err = cli("ptx", "list", "--model", nano, "--json")
    rows = json.loads(out)
    assert code == 0
    assert f"{len(rows) + sum(row['alike'] for row in rows)} kernels for sm_90" in err
    argmax = next(row for row in rows if row["kernel"] == "argmax")
    assert argmax["launches_per_decode_step"] == 1
    assert argmax["launches_per_prompt_step"] == 1
    assert argmax["bytes_moved"] == Argmax(argmax["fields"]["n"]).bytes_moved()
    assert {step["kind"] for step in argmax["steps"]} == {"greedy", "prompt greedy"}
    products = {row["roles"][0]: row for row in rows if row["launches_per_decode_step"]}
    assert products["attn_qkv"]["launches_per_decode_step"] == 2
    assert products["output"]["launches_per_decode_step"] == 1
    text = cli("ptx", "list", "--model", nano, "--gpu", "l4")
    assert "sm_89, 58 SMs (L4)" in text[2]
    folded = json.loads(cli("ptx", "list", "--model", nano, "--gpu", "l4", "--json")[1])
    head, *lines = text[1].splitlines()
    assert len(lines) == len(folded)
    column = head.index("a step of")  # all columns but the last are aligned
    assert all(line[column - 1] == " " != line[column] for line in lines)
    every = cli("ptx", "list", "--model", nano, "--gpu", "l4", "--all")
    alike = sum(row["alike"] for row in folded)
    assert len(every[1].splitlines()) == len(folded) + alike + 1 > 2 * len(folded)
    assert f"\n{alike} of them are those of shorter prompts" in text[2]
    assert "shorter prompts" not in every[2]
    assert "prompt (16 rows)" in every[1]
    assert "prompt (16 rows)" not in text[1]


@pytest.mark.parametrize(
    ("gpu", "sms", "shared"), [("h200", 132, 102_242), ("l4", 58, 101_376), ("t4", 40, 65_536)]
)
def test_products_of_a_model_are_cut_for_the_gpu(
    cli: Cli, nano: Path, gpu: str, sms: int, shared: int
) -> None:
    """Its SMs, and its shared memory: all, or a share where two CTAs are to be on an SM, the larger
    one where a residual is added."""
    rows = json.loads(cli("ptx", "list", "--model", nano, "--json", "--gpu", gpu)[1])
    products = [row for row in rows if row["kernel"] == "gemv"]
    assert not any(row["kernel"] == "gemv_f32" for row in rows)
    assert {row["fields"]["options"]["sms"] for row in products} == {sms}
    launches, last = {True: 0, False: 0}, {True: 0, False: 0}
    for row in products:
        options = row["fields"]["options"]
        adds = "residual" in [step["step"] for step in row["fields"]["epilogue"]]
        launches[adds] += row["launches_per_decode_step"]
        last[adds] += row["launches_per_prompt_step"]
        assert (options["least_shared"] > 0) == (gpu == "h200" and adds)
        assert options["shared"] == shared or adds
    assert launches == {True: 2 * 2, False: 2 * 2 + 1}
    assert last == {True: 2, False: 1 + 1}  # of a prompt's last row, from O of the last layer on


def test_dump_prints_one_text(cli: Cli) -> None:
    code, out, _ = cli(
        "ptx", "dump", "prepare_tokens", "--set", "head_dim=128", "--target", "sm_80"
    )
    assert code == 0
    assert "head_dim=128 as asked for; the others" in out
    assert "head_dim=128," in body_of(out)
    assert ".target sm_80" in out
    assert "kernel's first example" in cli("ptx", "dump", "prepare_tokens")[1]
    found = json.loads(cli("ptx", "dump", "prepare_tokens", "--emit", "json")[1])
    assert found["key"] == smallest_example(PrepareTokens).key("sm_90")


def test_dump_takes_a_class(cli: Cli) -> None:
    by_class = cli("ptx", "dump", "urdir.ptxgen.kernels.add:Add", "--set", "n=7")
    assert by_class == cli("ptx", "dump", "add", "--set", "n=7")
    assert by_class[0] == 0


def test_dump_writes_files(cli: Cli, tmp_path: Path) -> None:
    forms = "ptx,json,cubin" if is_available() else "ptx,json"
    code, out, _ = cli(
        "ptx", "dump", "add", "--set", "n=7", "-o", tmp_path / "out", "--emit", forms
    )
    assert code == 0
    assert sorted(out.split()) == sorted(str(p) for p in (tmp_path / "out").iterdir())
    assert len(out.split()) == len(forms.split(","))


def test_dump_of_a_model_has_every_kernel_once(cli: Cli, nano: Path, tmp_path: Path) -> None:
    rows = json.loads(cli("ptx", "list", "--model", nano, "--json", "--all")[1])
    assert cli("ptx", "dump", "--model", nano, "-o", tmp_path)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{row['key']}.ptx" for row in rows}


@needs_assembler
def test_stats_of_a_kernel(cli: Cli) -> None:
    code, out, _ = cli("ptx", "stats", "normalise", "--set", "cols=4096", "--gpu", "h200")
    assert code == 0
    for word in ("registers", "0 bytes spilt", "occupancy", "limited by", "H200", "4,800 GB/s"):
        assert word in out
    argv = ("stats", "normalise", "--set", "cols=4096", "--json")
    (first,) = json.loads(cli("ptx", *argv, "--bandwidth", "1e9")[1])
    assert first["bound_seconds"] == pytest.approx(3 * 4 * 4096 / 1e9)
    assert first["registers"] > 0
    (second,) = json.loads(cli("ptx", *argv, "--bandwidth", "1e18", "--flops", "1e6")[1])
    assert second["bound_by"] == "arithmetic"
    assert second["bound_seconds"] == pytest.approx(second["flops"] / 1e6)
    assert cli("ptx", "stats", "--gpus")[1].count("\n") > 8
    gpus = json.loads(cli("ptx", "stats", "--gpus", "--json")[1])
    assert {gpu["name"] for gpu in gpus} > {"h200", "t4"}


@pytest.mark.slow
@needs_assembler
def test_stats_of_a_model_is_a_table_without_spills(cli: Cli, nano: Path) -> None:
    rows = json.loads(cli("ptx", "stats", "--model", nano, "-c", "64", "--json")[1])
    assert all(row["spill_bytes"] == 0 and row["code_bytes"] > 0 for row in rows)
    assert all(row["occupancy"]["ctas_per_sm"] > 0 for row in rows)
    text = cli("ptx", "stats", "--model", nano, "-c", "64")[1]
    steps_of, lines = [part.splitlines() for part in text.split("\n\n")]
    assert (len(steps_of), len(lines)) == (4, len(rows) + 1)
    steps = [step for row in rows for step in row["steps"] if step["kind"] == "greedy"]
    launches = sum(step["launches"] for step in steps if step["keys"] == 256)
    assert launches == 2 * 5 + 4  # two layers; embedding, output, argmax, advance
    assert re.search(rf"^decode, 1 token, 256 keys +{launches} ", steps_of[2])


@needs_assembler
@pytest.mark.parametrize("width", [80, pytest.param(140, marks=pytest.mark.full)])
def test_tables_are_as_wide_as_the_terminal(
    cli: Cli, nano: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "terminal_width", lambda: width)
    for argv, least in (
        (("list", "--model", nano), ("launches", "what", "kernel", "a step of")),
        (("stats", "--model", nano, "-c", "8"), ("what", "kernel", "regs", "us", "bound by")),
        (("stats", "--gpus"), ("name", "SMs", "GB/s", "f16 tensor")),
        (("stats", "gemm"), ("registers", "bound")),
        (("explain", "normalise"), ("global memory", "ld.global")),
        (("list",), ("gemm", "normalise")),
    ):
        code, out, _ = cli("ptx", *argv)
        assert code == 0
        assert max(map(len, out.splitlines())) <= width, argv
        assert all(word in out for word in least), argv


@pytest.mark.slow
@needs_assembler
def test_stats_are_drawn(cli: Cli, nano: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with the optional matplotlib")
    for argv in (("--model", nano, "-c", "8"), ("add",)):
        picture = tmp_path / "kernels.svg"
        code, _, err = cli("ptx", "stats", *argv, "--plot", picture)
        assert (code, f"{picture} written" in err) == (0, True)
        drawn = picture.read_text()
        assert drawn.count("<path") > 20
    assert cli("ptx", "stats", "add", "--plot", tmp_path / "x.nothing")[0] == 1
    assert cli("ptx", "stats", "add", "--plot", tmp_path / "no" / "x.png")[0] == 1


def test_drawing_without_matplotlib(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = cli("ptx", "stats", "gemm", "--plot", tmp_path / "x.png")
    assert (code, out) == (1, "")
    assert "pip install 'urdir[plot]'" in err


def test_stats_without_an_assembler(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise AssemblerMissingError("not here")

    monkeypatch.setattr(assembler, "_library", missing)
    code, out, err = cli("ptx", "stats", "add")
    assert code == 0
    assert "urdir[assemble]" in err
    assert "bound" in out
    assert "registers" not in out
    assert cli("ptx", "dump", "add", "--emit", "cubin", "-o", "x")[0] == 1


def test_diff_and_check(cli: Cli, tmp_path: Path) -> None:
    for target in ("sm_80", "sm_90"):
        cli("ptx", "dump", "add", "--target", target, "-o", tmp_path / target)
    left, right = tmp_path / "sm_80", tmp_path / "sm_90"
    code, out, _ = cli("ptx", "diff", left, right)
    assert code == 1
    assert "+.target sm_90" in out
    assert "fma instructions" in out
    line, count = cli("ptx", "diff", left, right, "--summary")[1].splitlines()
    assert line.startswith(f"{next(left.iterdir()).name}: ")
    assert "->" in line or "only the text" in line
    assert count == "1 differ, 0 equal"
    assert cli("ptx", "diff", left, left)[:2] == (0, "0 differ, 1 equal\n")
    (file,) = left.iterdir()
    assert cli("ptx", "check", file)[0] == 0
    bad = tmp_path / "bad.ptx"
    bad.write_text(file.read_text().replace("    ret;", "    bra NOWHERE;\n    ret;"))
    code, out, _ = cli("ptx", "check", file, bad)
    assert code == 1
    assert "NOWHERE is not declared" in out
    assert any(line.startswith(">") for line in out.splitlines())


@pytest.mark.slow
def test_a_run_with_edited_ptx_says_so_and_uses_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("run", "--temp", "0", "-n", "1", "--raw", "-p", "Once")
    monkeypatch.setenv("URDIR_DUMP", str(tmp_path / "dump"))
    code, expected, err = cli(*argv)
    assert (code, "override" in err) == (0, False)
    (argmax,) = (tmp_path / "dump").glob("argmax-*.ptx")
    edited = tmp_path / "edited"
    edited.mkdir()
    # the rank of index 7, above every other one
    stored = "st.global.u64 [%ranks], %rank;"
    changed = argmax.read_text().replace(stored, stored.replace("%rank;", f"{2**64 - 8};"))
    (edited / argmax.name).write_text(changed)
    monkeypatch.delenv("URDIR_DUMP")
    monkeypatch.setenv("URDIR_PTX_OVERRIDE", str(edited))
    code, out, err = cli(*argv)
    assert code == 0
    assert out != expected
    assert f"PTX override: {edited / argmax.name} is used" in err
    assert argmax.name in err
    monkeypatch.setenv("URDIR_PTX_OVERRIDE", str(tmp_path / "absent"))
    assert cli(*argv)[0] == 1


def test_dump_from_a_device_takes_the_drivers_cubin(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the emulator in place of a GPU: what its linker makes is what is written."""
    from urdir.driver.device import Device

    open_device = Device.open
    monkeypatch.setattr(Device, "open", lambda name: open_device("emulator:sm_80"))
    argv = ("dump", "add", "--from-device", "cuda", "--emit", "cubin,ptx", "-o", tmp_path)
    code, _, err = cli("ptx", *argv)
    assert (code, err) == (0, "")
    ptx, cubin = sorted(tmp_path.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert ".target sm_80" in ptx.read_text()
    assert cubin.suffix == ".cubin"
    assert b"add" in cubin.read_bytes()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("frobnicate",), 2, "frobnicate"),
        (("dump",), 2, "KERNEL"),
        (("dump", "add", "--model", "x"), 2, "not both"),
        (("dump", "--model", "demo"), 2, "-o DIR"),
        (("dump", "--model", "demo", "--set", "n=3", "-o", "x"), 2, "--set"),
        (("dump", "add", "--emit", "cubin"), 2, "-o DIR"),
        (("dump", "add", "--emit", "exe"), 2, "cannot emit 'exe'"),
        (("dump", "ad"), 2, "no kernel 'ad'"),
        (("dump", "nowhere:Add"), 2, "nowhere"),
        (("dump", "urdir.ptxgen.kernels.add:Sub"), 2, "Sub"),
        (("dump", "urdir.ptxgen.spec:KernelSpec"), 2, "not a KernelSpec with a name"),
        (("dump", "add", "--set", "m=3"), 2, "no field 'm'"),
        (("dump", "add", "--set", "n=three"), 2, "not int"),
        (("dump", "add", "--set", "n=0"), 2, "n is 0: 1 or more"),
        (("dump", "add", "--target", "sm_1"), 2, "unknown target 'sm_1'"),
        (("dump", "add", "--from-device", "emulator"), 2, "cuda"),
        (("dump", "--model", "/absent.gguf", "-o", "x"), 1, "/absent.gguf"),
        (("list", "--model", "demo", "--target", "sm_1"), 2, "sm_1"),
        (("list", "--model", "demo", "-c", "1000000"), 2, "1000000"),
        (("list", "--gpu", "h200"), 2, "--model"),
        (("list", "add", "--model", "demo"), 2, "not both"),
        (("list", "ad"), 2, "no kernel 'ad'"),
        (("stats",), 2, "KERNEL"),
        (("stats", "add", "--gpu", "voodoo"), 2, "voodoo"),
        (("stats", "add", "--gpu", "l4", "--target", "sm_90"), 2, "not an sm_90"),
        (("stats", "add", "--bandwidth", "fast"), 2, "--bandwidth"),
        (("diff", "/absent", "/absent2"), 1, "/absent"),
        (("diff", "/absent"), 2, "B"),
        (("check", "/absent.ptx"), 1, "/absent.ptx"),
        (("check", "/absent.ptx", "--target", "sm_1"), 2, "sm_1"),
    ],
)
def test_bad_input_gets_one_line(cli: Cli, argv: tuple[str, ...], code: int, message: str) -> None:
    found, out, err = cli("ptx", *argv)
    assert (found, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_every_help_has_examples(cli: Cli) -> None:
    for words in ((), ("list",), ("dump",), ("stats",), ("diff",), ("check",)):
        code, out, _ = cli("ptx", *words, "--help")
        assert code == 0
        assert "examples:\n  urdir ptx" in out


def user_seconds(*words: str) -> float:
    """Processor time of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *words],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before.ru_utime


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_models_kernels_take_seconds(tmp_path: Path) -> None:
    """Machines differ: a unit is what a loop takes, some 0.5 s."""
    unit = user_seconds("-c", "sum(i * i % 7 for i in range(4_000_000))")
    for words in (["list"], ["dump", "-o", str(tmp_path)], ["stats"]):
        # By hand 2, 8 and 9 units.
        assert user_seconds("-m", "urdir.model", "ptx", *words, "--model", "demo") < 40 * unit
