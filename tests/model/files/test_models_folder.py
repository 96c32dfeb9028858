"""The models of a folder: files, split files, folders; no adapters, projectors or hidden files."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest

from urdir.model.errors import ModelError
from urdir.model.files.models_folder import models_in


def write(path: Path, size: int = 5) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def test_what_is_a_model(tmp_path: Path) -> None:
    for file in (
        *("b.gguf", "a b.Q4_K_M.gguf", "mmproj-b.gguf", ".hidden.gguf", "text.txt", "c.GGUF"),
        *("s-00001-of-00002.gguf", "s-00002-of-00002.gguf", "half-00001-of-00002.gguf"),
        *("folder/config.json", "folder/model.safetensors", "folder/m2.safetensors"),
        *("b/config.json", "b/model.safetensors"),  # the file has that name
        *("peft/adapter_config.json", "peft/adapter_model.safetensors", "peft/config.json"),
        *("one/x.gguf", "one/mmproj-x.gguf", "parts/p-00001-of-00002.gguf"),
        *("parts/p-00002-of-00002.gguf", "two/x.gguf", "two/y.gguf", ".git/x.gguf", "empty/x.txt"),
        "deep/er/x.gguf",
    ):
        write(tmp_path / file)
    adapter = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    adapter.add_type("adapter")
    adapter.write_header_to_file()
    adapter.write_kv_data_to_file()
    adapter.write_tensors_to_file()
    adapter.close()
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "line\nbreak.gguf").write_text("x")
    found = {model.name: model for model in models_in(tmp_path)}
    assert list(found) == ["a b.Q4_K_M", "b", "folder", "one", "parts", "s"]
    assert found["b"].path == tmp_path / "b.gguf"
    assert (found["s"].path.name, found["s"].nbytes) == ("s-00001-of-00002.gguf", 10)
    assert (found["folder"].path, found["folder"].nbytes) == (tmp_path / "folder", 10)
    assert found["parts"].path == tmp_path / "parts" / "p-00001-of-00002.gguf"
    assert found["one"].modified == (tmp_path / "one" / "x.gguf").stat().st_mtime


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing: No such file"):
        models_in(tmp_path / "nothing")
    write(tmp_path / "file")
    with pytest.raises(ModelError, match="Not a directory"):
        models_in(tmp_path / "file")
