"""Flags of `urdir serve` from a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from urdir.model.cli import build_parser

CONFIG = """
model = "m.gguf"
ctx-size = 256
port = 9
temp = 0.5
api-key = ["a", "b"]
no_webui = true
exit-on-device-loss = false
log-format = "json"
"""


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return str(path)


def test_flags_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line wins over the environment, and that over the file."""
    path = _write(tmp_path, CONFIG)
    monkeypatch.setenv("LLAMA_ARG_PORT", "10")
    parser = build_parser("serve")
    args = parser.parse(["serve", "-c", "512", "--config", path])
    assert (args.model, args.ctx_size, args.port, args.temperature) == ("m.gguf", 512, 10, 0.5)
    assert (args.api_key, args.page, args.exit_on_device_loss) == (["a", "b"], False, False)
    assert args.log_format == "json"
    monkeypatch.setenv("URDIR_ARG_CONFIG", path)
    assert build_parser("serve").parse(["serve"]).ctx_size == 256
    assert build_parser("serve").parse(["serve", "other.gguf"]).model is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ctx-sise = 1", "no flag 'ctx-sise': did you mean ctx-size?"),
        ("config = 'x'", "no flag 'config'"),
        ("ctx-size = 'x'", "ctx-size: argument -c/--ctx-size: 'x' is not a whole number"),
        ("no-webui = 3", "no-webui: true or false, not 3"),
        ("[section]\nb = 1", "no flag 'section'"),
        ("port = {a = 1}", "port: a text or a number, not {'a': 1}"),
        ("port =", "Invalid value"),
        ("port = [1, 2]", "port: one value, not a list"),
        ("c = 1\nctx-size = 2", "ctx-size is the same flag as c: give one of them"),
        ("m = 'a'\nhf = 'b/c'", "hf: it excludes m"),
        ("webui = true\nno-webui = true", "it excludes webui"),
    ],
)
def test_what_is_wrong_is_said(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(SystemExit) as ended:
        build_parser("serve").parse(["serve", "--config", path])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert path in said
    assert error in said


def test_short_names_and_flags_without_effect(tmp_path: Path) -> None:
    """Flags without effect share an action, and are not the same flag."""
    path = _write(tmp_path, "c = 128\nthreads = 4\nthreads-batch = 8\n")
    assert build_parser("serve").parse(["serve", "--config", path]).ctx_size == 128


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser("serve").parse(["serve", "--config", "none.toml"])
    assert "--config none.toml: No such file or directory" in capsys.readouterr().err


PRESETS = """
ctx-size = 256
temp = 0.5
["org/a:Q8_0"]
model = "a.gguf"
ctx-size = 1024
load-on-startup = true
[b]
c = 512
sleep_idle_seconds = 60
"""


def test_presets_have_flags_of_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line wins over the environment, that over a table, that over the rows for all."""
    path = _write(tmp_path, PRESETS)
    monkeypatch.setenv("LLAMA_ARG_TOP_K", "7")
    args = build_parser("serve").parse(["serve", "--models-preset", path, "--top-p", "0.5"])
    a, b, other = (args.presets[name] for name in ("org/a:Q8_0", "b", ""))
    assert (a.model, a.ctx_size, a.temperature, a.load_on_startup) == ("a.gguf", 1024, 0.5, True)
    assert (b.model, b.ctx_size, b.sleep_idle_seconds, b.load_on_startup) == (None, 512, 60, False)
    assert (other.ctx_size, other.temperature, other.sleep_idle_seconds) == (256, 0.5, -1)
    assert {(each.top_p, each.top_k) for each in (a, b, other)} == {(0.5, 7)}
    assert (args.ctx_size, args.temperature) == (None, None)
    wins = build_parser("serve").parse(["serve", "--models-preset", path, "-c", "8"])
    assert [wins.presets[name].ctx_size for name in ("org/a:Q8_0", "b", "")] == [8, 8, 8]
    config = tmp_path / "config.toml"
    config.write_text(f'models-preset = "{path}"\nctx-size = 2\nn = 5\n')
    below = build_parser("serve").parse(["serve", "--config", str(config)])
    assert [below.presets[name].ctx_size for name in ("b", "")] == [512, 256]
    assert (below.presets["b"].n_predict, below.presets["b"].models_preset) == (5, path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[a]\nctx-sise = 1", ": [a]: no flag 'ctx-sise': did you mean ctx-size?"),
        ("[a]\nport = 1", ": [a]: port is a flag of the whole server, and no model's"),
        ("api-key = 'x'", ": api-key is a flag of the whole server"),
        ("[a]\nmodels-dir = 'x'", ": [a]: models-dir is a flag of the whole server"),
        ("[a]\nmodels-preset = 'x'", ": [a]: models-preset is a flag of the whole server"),
        ("[a]\nload-on-startup = 1", ": [a]: load-on-startup: true or false, not 1"),
        ("[a]\nc = 'x'", ": [a]: c: argument -c/--ctx-size: 'x' is not a whole number"),
        ("[a.b]\nc = 1", ': [a]: a name with dots is written in quotes: ["a.b"]'),
        ("[a", "--models-preset {path}: Expected"),
    ],
)
def test_what_is_wrong_with_presets_is_said(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(SystemExit) as end:
        build_parser("serve").parse(["serve", "--models-preset", path])
    assert end.value.code == 2
    assert error.format(path=path) in capsys.readouterr().err
