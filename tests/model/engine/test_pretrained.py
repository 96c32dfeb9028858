"""Folders as transformers writes them, run: its logits, and those of GGUF files of the same."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from urdir.model.commands import options
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.text.chat import ChatTemplate, Message
from urdir.model.verify.conformance import relative_rms

#: Heads of Q and K in llama-bf16.
HEADS = {"attn_q": 2, "attn_k": 1}
FOLDERS = ("llama-bf16", "qwen2-f16-sharded", "qwen3moe-bf16")
#: bitsandbytes' four bits.
_BECOME_F32 = pytest.mark.filterwarnings("ignore:.* become F32, exactly:UserWarning")


def _logits(path: Path, device: str, tokens: Any, **options: Any) -> Any:
    with (
        Engine.open(
            path, device=device, context=64, cache_folder=None, kv_dtype="f32", **options
        ) as engine,
        EagerSteps(engine.session) as eager,
    ):
        rows = []
        for token in tokens:
            eager.feed([int(token)])
            rows.append(eager.logits()[0])
        return np.array(rows)


@_BECOME_F32
@pytest.mark.references("folders", FOLDERS)
def test_logits_are_those_of_transformers(
    data: Path, device_name: str, name: str, pytestconfig: pytest.Config, supported: Any
) -> None:
    folder = (pytestconfig.getoption("--references") or data / "safetensors") / name
    with np.load(folder / "golden.npz") as file:
        tokens, wanted = file["tokens"], file["logits"]
    count = 48 if pytestconfig.getoption("--full") or device_name == "cuda" else 16
    with supported(name):
        logits = _logits(folder, device_name, tokens[:count], exact=True)
    assert relative_rms(logits, wanted[:count]) < 1e-4


@_BECOME_F32
@pytest.mark.references("folders", FOLDERS[:1])
def test_default_logits_are_near(
    data: Path, device_name: str, name: str, pytestconfig: pytest.Config, supported: Any
) -> None:
    """Activations in 16 bits cost up to 3 percent. A router may flip then, so that the median of
    positions counts."""
    folder = (pytestconfig.getoption("--references") or data / "safetensors") / name
    with np.load(folder / "golden.npz") as file:
        tokens, wanted = file["tokens"], file["logits"]
    count = 48 if pytestconfig.getoption("--full") or device_name == "cuda" else 8
    with supported(name):
        logits = _logits(folder, device_name, tokens[:count], exact=False)
    errors = [relative_rms(*rows) for rows in zip(logits, wanted[:count], strict=True)]
    assert np.median(errors) < 0.03


def write_gguf(model: SafetensorsModel, path: Path) -> Path:
    """The same metadata (but the tokeniser's) and tensors as a GGUF file, by the gguf package."""
    writer = reference.GGUFWriter(path, model.architecture)
    for key, value in model.metadata.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    for name, tensor in model.tensors.items():
        kind = reference.GGMLQuantizationType(tensor.type_id)
        block, block_nbytes = reference.GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(bytes(tensor.data[:]), np.uint8)
        if model.architecture == "llama" and (heads := HEADS.get(name.split(".")[-2])):
            # a converter moves rows, so that neighbours rotate together
            raw = raw.reshape(heads, 2, -1, raw.size // tensor.shape[0]).swapaxes(1, 2).copy()
        rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_nbytes)
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "kind"), [("llama-bf16", None), ("qwen2-f16-sharded", "q8_0")])
def test_a_gguf_file_of_it_gives_the_same(
    data: Path, tmp_path: Path, device_name: str, name: str, kind: str | None
) -> None:
    folder = data / "safetensors" / name
    file = write_gguf(SafetensorsModel(folder, kind), tmp_path / "same.gguf")
    tokens = [5, 300, 17, 42]
    ours = _logits(folder, device_name, tokens, quantize=kind)
    # a head of LLaMA has its values in another order, which changes sums
    assert relative_rms(ours, _logits(file, device_name, tokens)) < 1e-6


def test_text(data: Path) -> None:
    with (
        Engine.open(data / "safetensors" / "llama-bf16", device="emulator", cache_folder=None) as e,
        ChatTemplate.of(e.file, e.tokenizer) as template,
    ):
        messages = [Message("user", "Hi <|end|> é")]
        prompt = "<|user|>user: Hi <|end|> é<|end|>assistant: "
        assert template.render(messages).text == prompt
        tokens = template.encode(messages)
        assert e.tokenizer.decode(tokens, keep_control=True) == prompt
        assert tokens.count(1) == 1  # the template's <|end|>; the user's is text
        assert (e.name, e.tokenizer.end_ids) == ("llama-bf16", {1})


def test_commands(data: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    folder = data / "safetensors" / "qwen2-f16-sharded"
    code, out, _ = cli("show", folder)
    assert code == 0
    assert out.startswith(f"{folder}: runs on ")
    assert "\nsafetensors, " in out
    assert "qwen2.rope.freq_base" in out
    assert "\nfields of config.json without effect:\n" in out
    assert "\n  torch_dtype\n" in out or "\n  dtype\n" in out
    code, out, _ = cli("show", folder, "--template")
    assert (code, out) == (0, (folder / "chat_template.jinja").read_text() + "\n")
    asked = ("run", "-m", folder, "-p", "a", "-n", "2", "--temp", "0")
    code, out, err = cli(*asked, "--quantize", "q8_0")
    assert code == 0, err
    code, _, err = cli(*asked, "--quantize", "q3_k")
    assert code == 2
    assert "q3_k" in err
    code, out, err = cli("logits", folder, "--tokens", "1,2", "--output", tmp_path / "x.npy")
    assert (code, np.load(tmp_path / "x.npy").shape) == (0, (2, 320))


def test_the_sampling_that_a_folder_recommends(data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data / "safetensors" / "llama-bf16", tmp_path / "copy"))
    said = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1e9, "min_p": "x"}
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    metadata = SafetensorsModel(folder).metadata
    usual = SamplingSettings(temperature=0.1, repeat_penalty=1.5, min_p=0.2)
    expected = replace(usual, temperature=0.6, top_p=0.9, top_k=7)  # the others are none
    assert usual.of_file(metadata) == expected
    with Engine.open(folder, device="emulator", cache_folder=None) as engine:
        assert engine.default_settings == SamplingSettings(temperature=0.6, top_p=0.9, top_k=7)
    parser = argparse.ArgumentParser()
    options.add_sampling(parser)
    given = options.sampling_settings(parser.parse_args(["--temp", "0.3"]), metadata=metadata)
    assert (given.temperature, given.top_k) == (0.3, 7)
