"""The options of an engine: one list, which `Engine.open` shows and which is checked at once."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.options import EngineOptions
from urdir.model.errors import SettingsError


@pytest.mark.parametrize("method", [Engine.open, Engine.opening])
def test_a_signature_has_every_option_once(method: Any) -> None:
    found = inspect.signature(method).parameters
    assert list(found) == [field.name for field in fields(EngineOptions)]
    assert {p.kind for p in list(found.values())[1:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert found["context"].default is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"split": "rows"}, "split is 'rows': expected tensors or layers"),
        ({"memory_share": 1.5}, r"memory_share is 1.5: expected 0 \(off\) to 1"),
        ({"memory_share": float("nan")}, "memory_share is nan"),
        ({"kv_dtype": "f64"}, "kv_dtype is 'f64'"),
        ({"sequences": 0}, "sequences is 0"),
        ({"context": -1}, "context is -1"),
        ({"chunk": -1}, "chunk is -1"),
        ({"pages": 3}, "pages is 3, page_len is 0"),
        ({"page_len": 24}, "page_len is 24"),
        ({"adapters": ["a.gguf"]}, "adapters are .*: expected pairs of a file and a scale"),
        ({"adapters": "a.gguf"}, "adapters are 'a.gguf': expected pairs"),
        ({"context": "64"}, "context is '64': expected a whole number"),
        ({"context": 64.0}, "context is 64.0: expected a whole number"),
        ({"sequences": True}, "sequences is True: expected a whole number"),
        ({"memory_share": "1"}, "memory_share is '1'"),
        ({"gpus": "2"}, "gpus is '2': expected a number of GPUs, or a list of their ordinals"),
        ({"gpus": ["0"]}, r"gpus is \['0'\]: expected a number"),
        ({"cache_folder": 5}, "cache_folder is 5: expected a path"),
        ({"stream_dir": 5}, "stream_dir is 5: expected a path"),
        ({"draft": 5}, "draft is 5: expected a path"),
        ({"max_adapter_rank": 8}, "max_adapter_rank is 8, without adapters: give max_adapters"),
    ],
)
def test_an_option_out_of_range_is_refused_before_anything_is_opened(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        Engine.open("no such file", device="no such device", **given)


def test_a_path_and_a_device_are_checked() -> None:
    for path in (5, b"demo"):
        with pytest.raises(SettingsError, match=f"path is {path!r}: expected a path"):
            EngineOptions(path)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="device is 5: expected a text"):
        EngineOptions(device=5)  # type: ignore[arg-type]


def test_folders_may_be_texts(data: Path, tmp_path: Path) -> None:
    kept, prefixes = tmp_path / "kept", tmp_path / "prefixes"
    with Engine.open(
        str(data / "golden" / "nano-llama-q8_0.gguf"),
        device="emulator",
        context=32,
        page_len=16,
        cache_folder=str(kept),
        prefix_dir=str(prefixes),
    ):
        assert prefixes.is_dir()
    assert any((kept / "emulator").rglob("*.cubin"))


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="devise"):
        Engine.open(devise="emulator")  # type: ignore[call-arg]


def test_many_users_have_pages_by_default() -> None:
    assert EngineOptions(memory_share=0.5, pages=3).pages == 3
    with pytest.raises(SettingsError, match="pages is 3"):
        EngineOptions(pages=3)


def test_options_are_read_without_numpy() -> None:
    """It would delay the driver, which is loaded first."""
    code = "import sys, urdir.model.engine.options as options; options.EngineOptions()"
    code += "; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
