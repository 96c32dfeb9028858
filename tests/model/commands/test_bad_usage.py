"""Command lines and files that are wrong: the exit code, and one line that says what."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.model.cli import COMMANDS

Cli = Callable[..., tuple[int, str, str]]


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
        (("run", "-r", "", "-p", "x"), "--stop: an empty text would end every answer"),
        (("run", "-p", "a\udcff"), "-p/--prompt: not UTF-8: byte 1 is 0xff"),
        (("run", "demo", "a\udcff"), "PROMPT: not UTF-8: byte 1 is 0xff"),
        (("tokenize", "demo", "\udcff"), "TEXT: not UTF-8: byte 0 is 0xff"),
        (("logits", "demo", "--tokens", "1", "-o", "-"), "/dev/stdout"),
        (("run", "-n", "0", "-p", "x"), "give 1 or more, or -1"),
        (("run", "-c", "-1", "-p", "x"), "-c"),
        (("run", "-c", "100000", "-p", "x"), "512"),
        (("run", "-ctk", "q4_1", "-p", "x"), "q4_0"),
        (("run", "-ctv", "e4m3", "-p", "x"), "fp8"),
        (("run", "-ot", "attn=DISK", "-p", "x"), "PATTERN=CPU"),
        (("run", "-ot", "nothing=CPU", "-p", "x"), "no such tensor"),
        (("run", "-cmoe", "-ncmoe", "3", "-p", "x"), "-ncmoe"),
        (("run", "--tem", "0", "-p", "x"), "unknown flag --tem: did you mean --temp?"),
        (("run", "-pg", "1,2"), "unknown flag -pg"),
        (("-m", "demo", "-p", "hi"), "urdir: -m comes after a command: urdir run -m ..."),
        (("run", "-kvu", "-p", "x"), "unknown flag -kvu (see"),  # not -kvo, which changes nothing
        (("serve", "--cors", "app.example"), "not an origin such as https://app.example.org"),
        (("serve", "--allowed-host", "a.example:80"), "leave scheme and port out"),
        (("serve", "--kv-cache-dtype", "fp8"), "-ctk TYPE and -ctv TYPE"),
        (("run", "demo", "x", "-p", "y"), "two prompts"),
        (("run", "demo", "-p"), "-p/--prompt: expected one argument"),
        (("run", "demo", "x", "--temp"), "--temp/--temperature: expected one argument"),
        (("run", "--chat-template", "lama", "-p", "x"), "--chat-template-file"),
        (("show",), "MODEL"),
        (("show", "demo", "-m", "demo"), "two models"),
        (("bench", "demo", "--shape", "llama-3.1-8b"), "--shape"),
        (("bench", "demo", "-p", "0", "-n", "0"), "-p, -n: nothing to measure"),
        (("bench", "demo", "--routing", "local"), "a share such as 0.9, or locality"),
        (("bench", "demo", "--routing", "0.4"), "between 0.5 and 0.99"),
        (("bench", "demo", "--embed", "1,8", "--lora", "4"), "--lora"),
        (("bench", "demo", "--mixed", "1,8", "--draft", "ngram"), "--draft"),
        (("bench", "demo", "--load", "http://127.0.0.1:1", "--draft", "ngram"), "--draft"),
        (("bench", "demo", "--load", "--lora", "4"), "--lora"),
        (("logits", "demo", "--tokens", "1,two", "-o", "x.npy"), "two"),
        (("logits", "demo", "--tokens", ",", "-o", "x.npy"), "no token"),
        (("logits", "demo", "--tokens", "1,2048", "-o", "x.npy"), "2048"),
        (("check", "--kernel", "ad"), "did you mean add"),
        (("check", "--kernel", "add", "--gpus", "2"), "--kernel"),
        (("quantize", "x"), "OUT.gguf"),
        (("embedding", "x"), "urdir embed"),
        (("perplexity", "x"), "one of the arguments"),
        (("run", "--lora-scaled", "x"), "FILE:SCALE"),
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


@pytest.mark.parametrize(
    "words",
    [
        ("pull", "a/b/c/d"),
        ("pull", "-hf", "a/b/c/d"),
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
    assert "is not a name such as hf:org/repo" in err
    assert "Traceback" not in err


def test_a_device_that_a_variable_names_wrongly(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URDIR_DEVICE", "tpu")
    code, _, err = cli("check", "--kernel", "add")
    assert (code, "$URDIR_DEVICE: unknown device 'tpu'" in err) == (2, True)


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


def test_unsupported_files_are_refused_by_name(cli: Cli, write_llama: Callable[..., Path]) -> None:
    cases = (
        (write_llama("a.gguf", arch="pockettts"), "pockettts"),
        (write_llama("b.gguf", without="block_count"), "llama.block_count"),
        (write_llama("c.gguf", type_of_q="I8"), "blk.0.attn_q.weight"),
    )
    for path, message in cases:
        code, out, err = cli("run", "-m", path, "-p", "x")
        assert (code, out) == (1, "")
        assert message in err
        assert len(err.splitlines()) == 1
