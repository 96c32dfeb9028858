"""`urdir serve` with several models: their names and flags, and flags that do not go together."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from urdir.model import demo_model
from urdir.model.cli import build_parser
from urdir.model.commands.serve import _serve_one
from urdir.model.commands.serve_models import Models
from urdir.model.errors import GgufError, SettingsError
from urdir.model.serve.access import Access
from urdir.model.serve.limits import Limits
from urdir.model.serve.logs import LogSettings
from urdir.model.serve.router.spec import ModelSpec

Cli = Callable[..., tuple[int, str, str]]


def serve_one(*given: Any) -> None:
    """In place of a server."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "models"
    (inner / "folder").mkdir(parents=True)
    shutil.copy(demo_model(), inner / "demo.gguf")
    (inner / "broken.gguf").write_text("no model")
    (inner / "folder" / "config.json").write_text("{}")
    (inner / "folder" / "model.safetensors").write_text("x")
    return inner


def found(*words: str) -> dict[str, ModelSpec]:
    args = build_parser("serve").parse(["serve", *words])
    return {spec.name: spec for spec in Models(args, serve_one).find()}


def flags(spec: ModelSpec) -> Any:
    """The flags that a model's process gets."""
    serve: Any = pickle.loads(pickle.dumps(spec.serve))
    return serve.args[0]


def test_models_have_names_files_and_flags(folder: Path, tmp_path: Path) -> None:
    presets = tmp_path / "p.toml"
    presets.write_text(
        'gpu-memory-share = 0.5\n[demo]\nalias = "teller,x"\nlora = "a/poet.gguf"\nc = 64\n'
        f'["org/far:Q8_0"]\nmodel = "{demo_model()}"\nsleep-idle-seconds = 7\n'
        'load-on-startup = true\n[hub]\nhf = "org/repo"\n'
    )
    specs = found("--models-dir", str(folder), "--models-preset", str(presets), "-n", "9")
    assert list(specs) == ["broken", "demo", "folder", "org/far:Q8_0", "hub"]
    demo, far = specs["demo"], specs["org/far:Q8_0"]
    assert (demo.names, demo.others) == (("demo", "teller", "x", "poet"), ("demo.gguf",))
    assert flags(demo).alias == ["demo", "teller", "x", "demo.gguf"]
    assert flags(demo).model == str(folder / "demo.gguf")
    assert (flags(demo).ctx_size, flags(demo).n_predict) == (64, 9)
    assert (flags(far).ctx_size, flags(far).model) == (None, str(demo_model()))
    assert (far.idle_seconds, far.load_on_startup, demo.idle_seconds) == (7, True, None)
    assert far.nbytes == demo.nbytes == demo_model().stat().st_size
    assert {spec.memory_share for spec in specs.values()} == {0.5}
    assert specs["folder"].others == ()
    assert flags(specs["hub"]).model == "hf:org/repo"
    specs["hub"].check()  # nothing is brought for that
    demo.check()
    with pytest.raises(GgufError, match="not a GGUF file"):
        specs["broken"].check()


def test_one_model_that_sleeps(folder: Path) -> None:
    path = str(folder / "demo.gguf")
    (spec,) = found(path, "--sleep-idle-seconds", "5").values()
    assert (spec.names, spec.any_name, spec.idle_seconds) == (("demo.gguf",), True, 5)
    assert (flags(spec).file, flags(spec).alias) == (path, None)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("-m", "x.gguf", "--models-dir", "{0}"), "-m with --models-dir or --models-preset"),
        (("x.gguf", "--models-dir", "{0}"), "-m with --models-dir or --models-preset"),
        (("--alias", "x", "--models-dir", "{0}"), "--alias with several models"),
        (("--ray", "--models-dir", "{0}"), "--ray serves one model"),
        (("--models-dir", "{0}/none"), "none: No such file"),
        (("--models-dir", "{0}", "--models-preset", "{0}/p.toml"), "has no model 'absent'"),
        (("--models-preset", "{0}/p.toml"), "the file has no model 'absent'"),
        (("--models-preset", "{0}/empty.toml"), "it has no table of a model"),
        (("--models-preset", "{0}/name.toml"), "cannot be the name of a model"),
        (("--models-dir", "{0}", "--models-max", "-1"), "--models-max"),
    ],
)
def test_what_does_not_go_together(
    cli: Cli, folder: Path, words: tuple[str, ...], error: str
) -> None:
    (folder / "p.toml").write_text("[absent]\nctx-size = 5\n")
    (folder / "empty.toml").write_text("ctx-size = 5\n")
    (folder / "name.toml").write_text('["a\\nb"]\nmodel = "x"\n')
    code, _, errors = cli("serve", *(word.format(folder) for word in words))
    assert code in (1, 2)
    assert error in errors


def test_flags_that_a_model_cannot_have_are_its_error(folder: Path, tmp_path: Path) -> None:
    presets = tmp_path / "p.toml"
    rows = 'spec-type = "ngram-simple"\ndraft-min = 9\ndraft-max = 3\n'
    presets.write_text(f'[demo]\nmodel = "{demo_model()}"\n{rows}')
    args = flags(found("--models-preset", str(presets))["demo"])
    listener: Any = None
    with pytest.raises(SettingsError, match="--draft-min 9 of --draft-max 3"):
        _serve_one(Access(), Limits(), LogSettings(), args, listener, lambda: None, 0.5)
