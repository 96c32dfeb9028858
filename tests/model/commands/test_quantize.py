"""`urdir quantize`: of a file and of a folder, by the processor and by a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("name", ["golden/nano-llama-q8_0.gguf", "safetensors/llama-bf16"])
def test_files_of_processor_and_device_are_equal(
    data: Path, tmp_path: Path, cli: Cli, device_name: str, name: str
) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    code, out, _ = cli("quantize", data / name, first, "--type", "q8_0")
    assert (code, out.partition(":")[0]) == (0, str(first))
    code, _, _ = cli("quantize", data / name, second, "--type", "q8_0", "--device", device_name)
    assert code == 0
    assert first.read_bytes() == second.read_bytes()


def test_a_folders_file_runs_as_the_folder(
    data: Path, tmp_path: Path, cli: Cli, device_name: str
) -> None:
    folder, out = data / "safetensors" / "qwen2-f16-sharded", tmp_path / "made.gguf"
    assert cli("quantize", folder, out, "--type", "q8_0")[0] == 0
    asked = ("-p", "a", "-n", "2", "--temp", "0", "--device", device_name)
    code, wanted, _ = cli("run", "-m", folder, "--quantize", "q8_0", *asked)
    assert code == 0
    assert cli("run", "-m", out, *asked)[:2] == (0, wanted)
    code, _, err = cli("quantize", folder, out)
    assert code == 1
    assert "exists already" in err


def test_a_type_stands_as_in_llama_cpp(data: Path, tmp_path: Path, cli: Cli) -> None:
    """Behind the files, in capitals."""
    model = data / "golden" / "nano-llama-q8_0.gguf"
    made = [tmp_path / f"{number}.gguf" for number in range(3)]
    assert cli("quantize", model, made[0], "--type", "q5_0")[0] == 0
    assert cli("quantize", model, made[1], "Q5_0")[0] == 0
    assert made[0].read_bytes() == made[1].read_bytes()
    code, _, err = cli("quantize", model, made[2], "Q5_0", "--type", "Q8_0")
    assert (code, "two types: q5_0 and q8_0" in err) == (2, True)
    assert not made[2].exists()
    folder = data / "safetensors" / "qwen2-f16-sharded"
    asked = ("run", "-m", folder, "-p", "a", "-n", "2", "--temp", "0", "--device", "emulator")
    wanted = cli(*asked, "--quantize", "q8_0", "-ctk", "q8_0")
    assert wanted[0] == 0
    assert cli(*asked, "--quantize", "Q8_0", "-ctk", "Q8_0")[:2] == wanted[:2]


@pytest.mark.parametrize("part", ["config.json", "model.safetensors.index.json"])
def test_a_part_of_a_folder_names_its_folder(data: Path, cli: Cli, part: str) -> None:
    folder = data / "safetensors" / "qwen2-f16-sharded"
    code, _, err = cli("show", folder / part)
    assert code == 1
    assert f"{part}: a part of a model: give its folder, {folder}" in err
    code, _, err = cli("run", "-m", "demo", "--lora", folder / part, "hi")
    assert code == 1
    assert f"{part}: a part of an adapter: give its folder, {folder}" in err


def test_a_model_may_be_named_as_elsewhere(tmp_path: Path, cli: Cli) -> None:
    code, out, _ = cli("quantize", "demo", tmp_path / "demo.gguf", "--type", "q8_0")
    assert (code, out.partition(":")[0]) == (0, str(tmp_path / "demo.gguf"))
    code, _, err = cli("quantize", "llama3:8b", tmp_path / "other.gguf")
    assert code == 1
    assert "hf:ORG/LLAMA3-GGUF" in err
    assert not (tmp_path / "other.gguf").exists()
