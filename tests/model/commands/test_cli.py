"""The commands as a user types them, in-process and as a process, with good and bad input."""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest

from urdir.driver.cache import CubinCache
from urdir.model.cli import COMMANDS, build_parser
from urdir.model.commands import options, prompts
from urdir.model.commands.report import print_statistics, seconds_text
from urdir.model.engine.generate import Statistics
from urdir.model.engine.sampling import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.files import hub
from urdir.model.files.demo import demo_model
from urdir.model.files.hub import HubName

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nano(data: Path) -> Path:
    return data / "golden" / "nano-llama-q8_0.gguf"


def _write_gguf(
    path: Path, *, arch: str = "llama", without: str = "", type_of_q: str = "F32"
) -> Path:
    """A one-layer llama file with one thing wrong."""
    writer = gguf_package.GGUFWriter(str(path), arch)
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "rope.dimension_count": 32,
    }.items():
        if key != without:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    square, vector = np.ones((32, 32), np.float32), np.ones(32, np.float32)
    for name in ("token_embd", "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output"):
        writer.add_tensor(f"{name}.weight", square)
    for name in ("blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"):
        writer.add_tensor(f"{name}.weight", square)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", vector)
    kind = gguf_package.GGMLQuantizationType[type_of_q]
    block, nbytes = gguf_package.GGML_QUANT_SIZES[kind]
    q = square if type_of_q == "F32" else np.zeros((32, 32 // block * nbytes), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", q, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_run_answers_with_the_demo_model(cli: Cli) -> None:
    code, out, err = cli("run", "--temp", "0", "-p", "What is 2 plus 3?")
    assert (code, out) == (0, "2 plus 3 is 5.\n")
    assert "seed" in err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), SamplingSettings(seed=1)),
        (
            ("--presence-penalty", "0.5", "--frequency-penalty", "-1.5", "--min-tokens", "3"),
            SamplingSettings(seed=1, presence_penalty=0.5, frequency_penalty=-1.5, min_tokens=3),
        ),
        (
            ("-l", "7+1.5", "--logit-bias", "30-100", "--repeat-last-n", "-1"),
            SamplingSettings(seed=1, logit_bias=((7, 1.5), (30, -100.0)), repeat_last_n=-1),
        ),
    ],
)
def test_flags_become_settings(flags: tuple[str, ...], expected: SamplingSettings) -> None:
    parser = argparse.ArgumentParser()
    options.add_sampling(parser)
    assert options.sampling_settings(parser.parse_args(["-s", "1", *flags])) == expected


@pytest.mark.slow
def test_run_prints_json_and_repeats_with_a_seed(cli: Cli) -> None:
    argv = ("run", "-p", "Hello!", "-n", "6", "--seed", "7", "--json")
    first, second = json.loads(cli(*argv)[1]), json.loads(cli(*argv)[1])
    assert first["text"] == second["text"] != ""
    assert first["statistics"]["seed"] == 7
    assert first["statistics"]["finish"] in ("length", "end")


@pytest.mark.slow
def test_run_reads_the_prompt_from_a_file_and_from_stdin(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("What is 2 plus 3?", encoding="utf-8")
    assert cli("run", "--temp", "0", "-f", tmp_path / "prompt.txt")[1] == "2 plus 3 is 5.\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 plus 3?"))
    assert cli("run", "--temp", "0")[1] == "2 plus 3 is 5.\n"


@pytest.mark.slow
def test_stop_strings_and_raw_prompts(cli: Cli) -> None:
    assert cli("run", "--temp", "0", "-p", "What is 2 plus 3?", "--stop", " is")[1] == "2 plus 3\n"
    code, out, _ = cli("run", "--raw", "--temp", "0", "-n", "4", "-p", "Once upon a")
    assert code == 0
    assert out.startswith(" time")


@pytest.mark.slow
def test_a_full_cache_ends_the_answer_and_says_so(cli: Cli) -> None:
    argv = ("run", "--raw", "--temp", "0", "--ignore-eos", "-c", "8", "-p", "Once upon a")
    code, out, err = cli(*argv)
    assert code == 0
    assert len(out) > 5
    assert "KV cache is full (8 tokens)" in err


@pytest.mark.slow
def test_chat_keeps_the_conversation(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = "What is 2 plus 3?\n/nonsense\nAnd plus 1?\n/clear\n/exit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
    code, out, err = cli("chat", "--temp", "0")
    assert code == 0
    assert out.splitlines() == ["2 plus 3 is 5.", "5 plus 1 is 6."]
    assert "/nonsense: unknown" in err
    assert "(0 cached)" not in err.splitlines()[-1]


@pytest.mark.slow
def test_chat_chooses_on_the_host_in_correctness_mode(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token from logits that were downloaded: the device is not asked for one."""

    def stream(*_: object, **__: object) -> None:
        raise AssertionError("tokens are chosen on the device")

    monkeypatch.setenv("CORRECTNESS_MODE", "1")
    monkeypatch.setattr(Session, "stream", stream)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 plus 3?\n"))
    code, out, _ = cli("chat", "--temp", "0")
    assert (code, out) == (0, "2 plus 3 is 5.\n")


def test_chat_says_how_many_tokens_are_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 40 + "\nHello!\n"))
    code, out, err = cli("chat", "--temp", "0", "-c", "32", "-n", "3")
    assert code == 0
    assert "exceed the context of 32 by" in err
    assert out.strip() != ""  # the next turn works


def test_show_needs_no_tokeniser(cli: Cli, nano: Path) -> None:
    code, out, _ = cli("show", nano, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["types"]["Q8_0"]["count"] == 16
    assert report["verdict"]["runs"]
    (memory,) = report["memory"]
    assert memory["context"] == report["model"]["context"]
    assert memory["total"] > memory["weights"] > 900_000
    others = {"context", "total"}
    assert memory["total"] == sum(memory[name] for name in memory.keys() - others)
    assert sum(tensor["bytes"] for tensor in report["tensors"]) == report["bytes"]
    assert report["roles"][0] == {
        "role": "token_embd",
        "shape": [320, 256],
        "type": "Q8_0",
        "count": 1,
    }
    assert {"role": "ffn_norm", "shape": [256], "type": "F32", "count": 2} in report["roles"]
    assert sum(entry["count"] for entry in report["roles"]) == len(report["tensors"])
    assert "im_start" in cli("show", demo_model(), "--template")[1]
    assert cli("show", nano, "--template")[0] == 1


@pytest.fixture
def family_file(data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Unpacks a tiny model of a family."""

    def unpack(name: str) -> Path:
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(lzma.decompress((data / "families" / f"{name}.gguf.xz").read_bytes()))
        return path

    return unpack


def test_show_has_the_memory_of_each_rank(cli: Cli) -> None:
    alone = json.loads(cli("show", "demo", "--json")[1])["memory"]
    memory = json.loads(cli("show", "demo", "--gpus", "2", "--json")[1])["memory"]
    assert [(row["context"], row["rank"]) for row in memory] == [(512, 0), (512, 1)]
    assert all(row["exchange"] > 0 for row in memory)
    assert alone[0]["weights"] < sum(row["weights"] for row in memory) < 2 * alone[0]["weights"]
    first, *rest = cli("show", "demo", "--gpus", "0,3")[1].splitlines()
    assert "each of 2 GPUs needs up to" in first
    at = rest.index("memory on each device:")
    assert rest[at + 1].split()[:2] == ["context", "rank"]
    assert [row.split()[:2] for row in rest[at + 2 : at + 4]] == [["512", "0"], ["512", "1"]]
    code, out, _ = cli("show", "demo", "--gpus", "5000")
    assert (code, "is no work for 5000 GPUs" in out) == (1, True)


def test_show_describes_layers_that_differ(cli: Cli, family_file: Callable[[str], Path]) -> None:
    """Windows, experts, sinks; and the keys of other architectures that the file has, too."""
    path = family_file("gpt-oss-moe")
    code, out, _ = cli("show", path, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["model"]["hidden"] == 128
    windowed, whole = report["layers"]
    assert (windowed["layers"], whole["layers"]) == ([0], [1])
    (attention,), (experts,) = windowed["blocks"]
    assert attention["rope"] == {"kind": "half", "dim": 64, "base": 10000.0}
    assert (attention["heads"], attention["kv_heads"], attention["window"]) == (2, 1, 20)
    assert attention["sinks"] is attention["bias"] is True
    assert (experts["experts"], experts["used"], experts["width"]) == (4, 2, 192)
    assert whole["blocks"] == [[{k: v for k, v in attention.items() if k != "window"}], [experts]]
    assert "gpt-oss.wkv.head_size" in report["ignored_keys"]
    assert "gpt-oss.expert_count" not in report["ignored_keys"]
    lines = cli("show", path)[1].splitlines()
    at = lines.index("  layer 0:")
    assert lines[at + 1].startswith(
        "    attention, heads 2, kv heads 1, dim 64, window 20, rope (half,"
    )
    assert lines[at + 2].startswith(
        "    experts, experts 4, used 2, width 192, activation swiglu_oai"
    )
    assert "  gpt-oss.wkv.head_size" in lines


def test_show_puts_equal_layers_together(cli: Cli, family_file: Callable[[str], Path]) -> None:
    """Attention beside a feed-forward network in both layers."""
    path = family_file("falcon-dense")
    (group,) = json.loads(cli("show", path, "--json")[1])["layers"]
    assert group["layers"] == [0, 1]
    ((attention, network),) = group["blocks"]
    assert (attention["kind"], network["kind"]) == ("attention", "feed-forward")
    assert attention["norm"] == network["norm"] == "layer 1e-05 with bias"
    lines = cli("show", path)[1].splitlines()
    at = lines.index("  layers 0-1:")
    assert lines[at + 2].startswith("    beside it feed-forward, width 192, activation gelu")


def test_logits_of_a_file_without_a_vocabulary(cli: Cli, nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "logits.npy"
    code, out, _ = cli("logits", nano, "--tokens", "1,2,3", "--output", output, "--json")
    assert code == 0
    assert json.loads(out)["shape"] == [3, 320]
    rows = np.load(output)
    assert rows.shape == (3, 320)
    assert rows.dtype == np.float32
    (tmp_path / "tokens").write_text("1 2\n3\n", encoding="utf-8")
    cli("logits", nano, "--tokens", f"@{tmp_path / 'tokens'}", "--output", output)
    np.testing.assert_array_equal(np.load(output), rows)


def test_show_prints_short_arrays_whole(cli: Cli, make_gguf: Callable[..., Path]) -> None:
    sections = np.array([16, 24, 24, 0], np.int32)
    path = make_gguf(
        {
            "general.architecture": "qwen2vl",
            "qwen2vl.rope.dimension_sections": sections,
            "floats": np.array([0.5, -1.0], np.float32),
            "names": ["one", "two"],
            "nothing": np.array([], np.uint8),
            "eight": np.arange(8, dtype=np.uint64),
            "nine": np.arange(9, dtype=np.uint64),
        }
    )
    code, out, _ = cli("show", path, "--json")
    assert code == 1  # it cannot run: there are no tensors
    found = json.loads(out)["metadata"]
    assert found["qwen2vl.rope.dimension_sections"] == [16, 24, 24, 0]
    assert found["floats"] == [0.5, -1.0]
    assert found["names"] == ["one", "two"]
    assert found["nothing"] == []
    assert (found["eight"], found["nine"]) == (list(range(8)), list(range(9)))
    report = json.loads(out)
    assert report["roles"] == report["layers"] == []
    assert not report["verdict"]["runs"]
    text = cli("show", path)[1]
    assert "cannot run: " in text.splitlines()[0]
    assert "[16, 24, 24, 0]" in text
    assert "[9 values]" in text


@pytest.mark.parametrize("clear", [(), ("--clear-cache",)])
def test_env_of_a_cache_that_is_a_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clear: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("URDIR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out, _ = cli("env", "--json", *clear)
    assert (code, json.loads(out)["cache"]["bytes"]) == (0, 0)


@pytest.mark.slow
def test_a_cache_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    """A warning without the place in the source."""
    (tmp_path / "file").write_text("not a folder")
    done = subprocess.run(
        [sys.executable, "-m", "urdir.model", "check", "--kernel", "add"],
        env={**_environment(), "URDIR_CACHE_DIR": str(tmp_path / "file" / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if "cache" in line]
    assert line.startswith("urdir: warning: kernels are compiled without the cache ")
    assert "warn" not in done.stderr.replace(line, "")


def test_env_clears_its_own_files_alone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CubinCache(tmp_path / "mine" / "emulator")
    cache.put("key", b"1234")
    cache.remember("spec", "0" * 64)
    others = [tmp_path / "mine" / name for name in ("thesis.txt", "emulator/notes.txt")]
    for other in others:
        other.write_text("not a kernel")
    monkeypatch.setenv("URDIR_CACHE_DIR", str(tmp_path / "mine"))
    kept = [path for path in (tmp_path / "mine" / "emulator").rglob("*") if path.is_file()]
    assert len(kept) == 3
    found = json.loads(cli("env", "--json")[1])["cache"]["bytes"]
    assert found == sum(path.stat().st_size for path in kept)
    assert cli("env", "--json", "--clear-cache")[0] == 0
    assert sorted(path for path in (tmp_path / "mine").rglob("*") if path.is_file()) == sorted(
        others
    )
    others[1].unlink()
    assert CubinCache(tmp_path / "mine" / "emulator").get("key") is None
    assert cli("env", "--json", "--clear-cache")[0] == 0
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("run", "--temp", "-1", "-p", "x"), "--temp"),
        (("run", "--top-p", "1.5", "-p", "x"), "--top-p"),
        (("run", "--top-k", "many", "-p", "x"), "--top-k"),
        (("run", "--presence-penalty", "101", "-p", "x"), "--presence-penalty"),
        (("run", "--frequency-penalty", "nan", "-p", "x"), "--frequency-penalty"),
        (("run", "--logit-bias", "7", "-p", "x"), "--logit-bias"),
        (("run", "--logit-bias", "7+101", "-p", "x"), "--logit-bias"),
        (("run", "-l", "7+1", "-l", "7-1", "-p", "x"), "logit_bias"),
        (("run", "--min-tokens", "-1", "-p", "x"), "--min-tokens"),
        (("run", "-n", "-3", "-p", "x"), "-n"),
        (("run", "-n", "0", "-p", "x"), "give 1 or more, or -1"),
        (("run", "-c", "-1", "-p", "x"), "-c"),
        (("run", "-c", "100000", "-p", "x"), "512"),
        (("run", "-ctk", "q8_0", "-p", "x"), "-ctv q8_0"),
        (("run", "-ctk", "q4_0", "-p", "x"), "q8_0"),
        (("run", "-ngl", "0", "-p", "x"), "-ngl"),
        (("run", "-ngl", "3", "-p", "x"), "6 layers"),
        (("run", "--tem", "0", "-p", "x"), "unknown flag --tem: did you mean --temp?"),
        (("run", "-pg", "1,2"), "unknown flag -pg"),
        (("run", "demo", "x", "-p", "y"), "two prompts"),
        (("run", "--chat-template", "lama", "-p", "x"), "--chat-template-file"),
        (("show",), "MODEL"),
        (("show", "demo", "-m", "demo"), "two models"),
        (("bench", "demo", "--shape", "llama-3.1-8b"), "--shape"),
        (("logits", "demo", "--tokens", "1,two", "-o", "x.npy"), "two"),
        (("logits", "demo", "--tokens", ",", "-o", "x.npy"), "no token"),
        (("logits", "demo", "--tokens", "1,2048", "-o", "x.npy"), "2048"),
        (("check", "--kernel", "ad"), "did you mean add"),
        (("check", "--kernel", "add", "--gpus", "2"), "--kernel"),
        (("quantize", "x"), "does not write"),
        (("embedding", "x"), "not computed"),
        (("perplexity", "x"), "not measured"),
        (("run", "--lora", "x"), "LoRA"),
        (("run", "-md", "x"), "draft model"),
        (("run", "--mmproj", "x"), "multi-modal"),
        (("run", "--seed", "1e3", "-p", "x"), "--seed"),
        (("run", "--device", "tpu", "-p", "x"), "tpu"),
        (("run", "--device", "emulator:sm_1", "-p", "x"), "sm_1"),
        (("run", "-p", "x", "-f", "y"), "not allowed"),
        (("run", "--raw", "--gpus", "17", "-p", "x"), "17 GPUs: at most 16"),
        (("run", "--embedding", "-p", "x"), "no embedding"),
        (("env", "extra"), "unexpected 'extra'"),
        (("ptx stats", "nobody"), "no kernel 'nobody'"),
        (("frobnicate",), "frobnicate"),
        (("rnu", "x"), "did you mean run"),
    ],
)
def test_bad_usage_exits_with_2(cli: Cli, argv: tuple[str, ...], message: str) -> None:
    code, out, err = cli(*argv[0].split(), *argv[1:])
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert f"(see urdir {argv[0]} --help)" in err or argv[0].split()[0] not in COMMANDS


def test_bad_files_exit_with_1_and_one_line(cli: Cli, tmp_path: Path, data: Path) -> None:
    whole = (data / "golden" / "nano-llama-q8_0.gguf").read_bytes()
    cases: dict[str, tuple[bytes, str]] = {
        "text.gguf": (b"not a model at all, just text", "GGUF"),
        "empty.gguf": (b"", "empty"),
        "header.gguf": (whole[:2000], "truncated"),
        "half.gguf": (whole[: len(whole) // 2], ""),
        "version.gguf": (whole[:4] + struct.pack("<I", 99) + whole[8:], "99"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        code, out, err = cli("run", "-m", path, "-p", "x")
        assert (code, out) == (1, ""), name
        assert name in err
        assert message in err
        assert len(err.splitlines()) == 1
    code, _, err = cli("run", "-m", tmp_path / "absent.gguf", "-p", "x")
    assert code == 1
    assert "absent.gguf" in err


def test_unsupported_files_are_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    cases = (
        (_write_gguf(tmp_path / "a.gguf", arch="rwkv7"), "rwkv7"),
        (_write_gguf(tmp_path / "b.gguf", without="block_count"), "llama.block_count"),
        (_write_gguf(tmp_path / "c.gguf", type_of_q="I8"), "blk.0.attn_q.weight"),
    )
    for path, message in cases:
        code, out, err = cli("run", "-m", path, "-p", "x")
        assert (code, out) == (1, "")
        assert message in err
        assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_prompts_and_tokens_that_cannot_be(cli: Cli, nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.npy"
    for argv, message in (
        (("run", "-m", nano, "-p", "x"), "vocabulary"),
        (("run", "-c", "8", "-p", "a long prompt that has more than eight tokens"), "context of 8"),
        (("run", "-c", "8", "-p", "a long prompt that has more than eight tokens"), "(-c N)"),
        (("run", "--raw", "-p", ""), "empty"),
        (("run", "-f", tmp_path / "absent.txt"), "absent.txt"),
        (
            ("logits", nano, "--tokens", "1", "--output", tmp_path / "no" / "x.npy"),
            "no such folder",
        ),
    ):
        code, out, err = cli(*argv)
        assert (code, out) == (1, ""), argv
        assert message in err
        assert len(err.splitlines()) == 1
    assert not output.exists()


def _environment() -> dict[str, str]:
    return {**os.environ, "URDIR_DEVICE": "emulator", "PYTHONPATH": os.pathsep.join(sys.path)}


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "urdir.model", "--help"],
        capture_output=True,
        text=True,
        env=_environment(),
        check=True,
    )
    assert time.perf_counter() - start < 2.0  # 0.4 s by hand; tests run beside others
    assert "examples:" in done.stdout
    for module in ("numpy", "cuda.bindings", "jinja2", "tokenizers", "gguf"):
        assert f" {module}\n" not in done.stderr


def test_a_closed_stdout_ends_quietly() -> None:
    command = f"{sys.executable} -m urdir.model show {demo_model()} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env=_environment(),
    )
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.fixture
def start_urdir() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start_urdir(*argv)``: the command as a process, which the test does not leave behind.

    It takes Ctrl-C also where these tests were started with it ignored, in the background.
    """
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from urdir.model.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", script, *argv],
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=_environment(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("seconds", "handler"), [(0.0, signal.default_int_handler), (0.73, signal.SIG_IGN)]
)
def test_an_interrupt_keeps_the_text_and_the_statistics(
    start_urdir: Callable[..., subprocess.Popen[str]], seconds: float, handler: Any
) -> None:
    before = signal.signal(signal.SIGINT, handler)  # as in a terminal, and in the background
    try:
        process = start_urdir("run", "--temp", "0", "--ignore-eos", "-p", "Tell me a story.")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    first = process.stdout.read(4)  # it has begun to answer
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first + rest) > 4
    assert " generated" in err
    assert ", seed " in err
    assert "Traceback" not in err


@pytest.mark.parametrize("module", ["urdir", "urdir.model"])
def test_the_package_is_the_command(module: str, tmp_path: Path) -> None:
    link = tmp_path / "urdir"
    link.symlink_to(Path(__file__).parents[3] / ".src" / "urdir")  # as a wheel has it
    environment = {**_environment(), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.fullmatch(r"urdir (\d+\.\d+\.\d+|not installed)\n", done.stdout)


def test_without_a_command_there_is_help(cli: Cli) -> None:
    for argv in ((), ("--help",), ("help",)):
        code, out, err = cli(*argv)
        assert (code, err) == (0, "")
        assert all(f"\n    {name}" in out for name in COMMANDS)
    assert cli("help", "run")[1] == cli("run", "--help")[1]
    assert cli("ptx")[1] == cli("ptx", "--help")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(cli: Cli, shell: str) -> None:
    code, out, _ = cli("completion", shell)
    assert code == 0
    for word in (*COMMANDS, "explain", "repeat-penalty", "temp", "clear-cache"):
        assert word in out
    assert "mirostat" not in out  # refused


def test_completion_in_bash(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "urdir.bash"
    script.write_text(cli("completion", "bash")[1])
    (tmp_path / "model.gguf").touch()

    def complete(*words: str) -> set[str]:
        typed = " ".join(f"'{word}'" for word in ("urdir", *words))
        line = (
            f". {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; "
            '$(complete -p urdir | sed -E "s/.*-F ([^ ]+).*/\\1/"); '
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return {word.strip() for word in done.stdout.splitlines()}

    assert complete("sh") == {"show"}
    assert complete("ptx", "st") == {"stats"}
    assert complete("run", "--min-") == {"--min-p", "--min-tokens"}
    assert complete("bench", "-o", "js") >= {"json", "jsonl"}
    for words in (("show", "mod"), ("run", "-m", "mod"), ("run", "mod"), ("ptx", "diff", "mod")):
        assert complete(*words) == {"model.gguf"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_completion_in_fish(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "urdir.fish").write_text(cli("completion", "fish")[1])
    (tmp_path / "model.gguf").touch()
    lines = ["urdir sh", "urdir ptx st", "urdir bench -o js", "urdir show mod", "urdir run -m mod"]
    script = "source urdir.fish; " + "; ".join(f"complete -C '{line}'" for line in lines)
    done = subprocess.run(
        ["fish", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert [word for word in found if word] == [
        *("show", "stats", "json", "jsonl", "model.gguf", "model.gguf")
    ]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_completion_in_zsh(cli: Cli, tmp_path: Path) -> None:
    """The function is found for the command, and zsh reads it."""
    (tmp_path / "_urdir").write_text(cli("completion", "zsh")[1])
    script = f"fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D; echo $_comps[urdir]"
    done = subprocess.run(
        ["zsh", "-f", "-c", f"{script}; autoload +X _urdir && whence -w _urdir"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("_urdir\n_urdir: function\n", "")


def test_list_has_the_demo_and_the_hubs_cache(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "absent"))
    assert [entry["name"] for entry in json.loads(cli("list", "--json")[1])] == ["demo"]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    for repo, files in {
        "models--a--b-GGUF": ["b-Q4_K_M.gguf", "b-Q8_0-00001-of-00002.gguf", "mmproj-b.gguf"],
        "models--c--whole": ["config.json", "model.safetensors"],
        "datasets--d--e": ["x.gguf"],
    }.items():
        snapshot = tmp_path / repo / "snapshots" / commit
        (tmp_path / repo / "blobs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (tmp_path / repo / "refs").mkdir()
        (tmp_path / repo / "refs" / "main").write_text(commit)
        for file in files:
            blob = tmp_path / repo / "blobs" / file
            blob.write_bytes(demo_model().read_bytes() if "Q4" in file else b"1234")
            (snapshot / file).symlink_to(blob)
    entries = json.loads(cli("list", "--json")[1])
    found = {entry["name"]: entry for entry in entries}
    # one part of two is no model
    assert list(found) == ["demo", "hf:a/b-GGUF:b-Q4_K_M.gguf", "hf:c/whole"]
    whole = found["hf:a/b-GGUF:b-Q4_K_M.gguf"]
    assert (whole["type"], whole["architecture"]) == ("Q4_K_M", "llama")
    assert whole["bytes"] == demo_model().stat().st_size
    assert found["hf:c/whole"]["bytes"] == 4
    head, *lines = cli("list")[1].splitlines()
    assert [line.split()[0] for line in lines] == list(found)
    assert head.split() == ["name", "size", "type", "architecture", "changed"]


def test_pull_says_where_the_model_is(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3 << 20))
    asked: list[HubName] = []
    monkeypatch.setattr(hub, "download", lambda name: asked.append(name) or path)
    assert cli("pull", "a/b-GGUF") == (0, f"{path}  3.00 MiB\n", "")
    out = cli("pull", "hf:a/b-GGUF:Q8_0", "--json")[1]
    assert json.loads(out) == {"path": str(path), "bytes": 3 << 20}
    assert asked == [HubName("a/b-GGUF", None), HubName("a/b-GGUF", "Q8_0")]
    assert cli("pull", path)[0] == 2


def test_an_answer_that_never_began_has_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    print_statistics(Statistics(seed=7, prompt_tokens=3))
    assert capsys.readouterr().err == "[3 prompt tokens (0 cached), 0 generated, seed 7]\n"
    print_statistics(Statistics(seed=7, prompt_tokens=3, generated_tokens=1, prompt_seconds=0.25))
    assert "first answer token after 250 ms, 1 generated, seed 7]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("pull", "a/b/c/d"),
        ("show", "hf:nosuch"),
        ("run", "-hf", "a/b:", "-p", "Hi"),
        ("serve", "-m", "hf:a b/c"),
        ("logits", "hf:a", "--tokens", "1", "--output", "x.npy"),
        ("ptx", "list", "--model", "hf:a"),
        ("bench", "hf:a"),
    ],
)
def test_what_is_no_name_is_bad_usage(cli: Cli, words: tuple[str, ...]) -> None:
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert "is no name such as hf:org/repo" in err
    assert "Traceback" not in err


def test_show_says_first_whether_it_runs(
    cli: Cli, tmp_path: Path, make_gguf: Callable[..., Path]
) -> None:
    code, out, _ = cli("show", "demo", "-c", "100")
    first, second, *rest = out.splitlines()
    assert code == 0
    assert "runs on the emulator" in first
    assert "a GPU needs" in first
    assert "Q4_K_M, 5.25 M parameters" in second
    at = rest.index("memory on the device:")
    assert rest[at + 1].split()[0] == "context"
    assert [row.split()[0] for row in rest[at + 2 : at + 4]] == ["100", "512"]
    for name, message in (("rwkv7", "architecture 'rwkv7'"), ("clip", "multi-modal projector")):
        code, out, err = cli("show", _write_gguf(tmp_path / f"{name}.gguf", arch=name))
        assert (code, err) == (1, "")
        assert f"cannot run: architecture '{name}' is not supported" in out.splitlines()[0]
        assert message in out.splitlines()[0]
    for kind, message in {
        "adapter": "a LoRA adapter: merge it",
        "mmproj": "a multi-modal projector",
        "imatrix": "an importance matrix",
    }.items():
        path = make_gguf({"general.architecture": "llama", "general.type": kind})
        assert message in cli("show", path)[1].splitlines()[0]
        code, out, err = cli("run", path, "x")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err
    path = make_gguf({"general.architecture": "nomic-bert-moe"})
    assert "it makes embeddings, which are not computed" in cli("run", path, "x")[2]
    message = cli("run", tmp_path / "rwkv7.gguf", "x")[2]
    assert len(message) < 250  # no list of all architectures


def test_escapes_templates_and_files_of_system_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system.txt").write_text("Be kind.")
    parser = build_parser("run")
    args = parser.parse(["run", "-e", "-p", r"a\n\"b\" \x41 \q", "-sys", r"\t"])
    assert prompts.given_prompt(args) == 'a\n"b" A \\q'
    assert prompts.given_system(args) == "\t"
    args = parser.parse(["run", "-p", r"a\n", "-sysf", str(tmp_path / "system.txt")])
    assert (prompts.given_prompt(args), prompts.given_system(args)) == (r"a\n", "Be kind.")
    args = parser.parse(["run", "--chat-template", "{{ messages }}", "-p", "x"])
    assert prompts.given_template(args) == "{{ messages }}"
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert prompts.given_prompt(parser.parse(["run", "-f", "-"])) == "from stdin"


def test_a_prompt_of_a_million_characters_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 300_000)
    code, _, err = cli("run", "-f", tmp_path / "long.txt")
    assert code == 1
    assert re.search(r"the conversation has 1,500,0\d\d characters", err)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.58, "1.58 s"),
        (0.99996, "1.00 s"),
        (0.0314, "31.4 ms"),
        (213e-6, "213 us"),
        (1234, "1234 s"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    """And no exponents: 0.99996 s is not 1e+03 ms."""
    assert seconds_text(seconds) == text
