"""tokenizer.model and tiktoken files made of GGUF vocabularies: texts become the same tokens."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf as reference
import numpy as np
import pytest

from urdir.model.errors import SafetensorsError, UnsupportedError
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import FOLDER, Metadata
from urdir.model.files.pretrained import sentencepiece
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.pretrained.sentencepiece import sentencepiece_metadata
from urdir.model.files.pretrained.tiktoken import is_tiktoken, tiktoken_metadata
from urdir.model.files.pretrained.tokens import text_metadata
from urdir.model.files.requantise import requantise
from urdir.model.text.spelling import BYTE_ALPHABET
from urdir.model.text.tokenizer import Tokenizer

TEXTS = (
    "", "a", " a", "Hello World!", "  two  spaces\n\n and\ttabs", "naïve café 東京 🙂🙂",
    "3.14159265", "def f(x):\n    return x**2  # square", "I'm, you're; WE'VE", "\r\n\r\n  ",
    "<s>[INST] no [/INST]",
)  # fmt: skip


def _tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    metadata = Metadata(text_metadata(folder, config))
    file: Any = SimpleNamespace(metadata=metadata, path=folder, tensors={})
    return Tokenizer.of(file)


def _varint(value: int) -> bytes:
    value %= 1 << 64
    found = b""
    while value >= 128:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def _message(*fields: tuple[int, Any]) -> bytes:
    """A protocol buffer: integers, floats, and bytes."""
    found = b""
    for number, value in fields:
        if isinstance(value, int):
            found += _varint(number << 3) + _varint(value)
        elif isinstance(value, float):
            found += _varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            found += _varint(number << 3 | 2) + _varint(len(value)) + value
    return found


def _sentencepiece(metadata: Metadata, algorithm: int = 2, most: int | None = None) -> bytes:
    tokens = metadata["tokenizer.ggml.tokens"]
    scores, types = (
        np.asarray(metadata[f"tokenizer.ggml.{name}"]).tolist() for name in ("scores", "token_type")
    )
    pieces = [
        (1, _message((1, token.encode()), (2, float(score)), (3, int(kind))))
        for token, score, kind in list(zip(tokens, scores, types, strict=True))[:most]
    ]
    trainer = _message((3, algorithm), (40, 0), (41, 1), (42, 2), (43, -1))
    return _message(*pieces, (2, trainer), (3, _message((3, 1))), (99, b"unknown"))


def test_sentencepiece(vocab_file: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    with Gguf(vocab_file("llama-spm")) as file:
        path.write_bytes(_sentencepiece(file.metadata))
        expected = Tokenizer.of(file)
        count = len(file.metadata["tokenizer.ggml.tokens"])
    added = {str(count): {"content": "<|new|>", "special": True}, "1": {"content": "<s>"}}
    settings = {"added_tokens_decoder": added, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = _tokenizer(tmp_path, {"eos_token_id": [2, 5, 1 << 30]})
    assert found.end_ids >= {2, 5}
    assert 1 << 30 not in found.end_ids
    with pytest.raises(SafetensorsError, match=r"eos_token_id is \['x'\], expected token ids"):
        text_metadata(tmp_path, {"eos_token_id": ["x"]})
    for text in TEXTS:
        wanted = expected.encode(text, add_bos=True)
        assert found.encode(text, add_bos=True) == wanted, text
        assert found.decode(wanted) == expected.decode(wanted)
    assert found.encode("<|new|>", parse_special=True) == [count]


def test_sentencepiece_in_a_file_made_of_a_folder(
    vocab_file: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    """Other programs do not know the tokeniser's name, and refuse the file."""
    folder = Path(shutil.copytree(data / "safetensors" / "llama-bf16", tmp_path / "copy"))
    (folder / "tokenizer.json").unlink()
    with Gguf(vocab_file("llama-spm")) as file:
        (folder / "tokenizer.model").write_bytes(_sentencepiece(file.metadata, most=320))
    out = tmp_path / "out.gguf"
    requantise(folder, out, "q8_0")
    named = reference.GGUFReader(out).fields["tokenizer.ggml.model"]
    assert named.contents() == "own.llama"
    with Gguf(out) as made, SafetensorsModel(folder, "q8_0") as loaded:
        assert set(loaded.metadata) == set(made.metadata) - {FOLDER}
        found, wanted = Tokenizer.of(made), Tokenizer.of(loaded)
    for text in TEXTS:
        assert found.encode(text, add_bos=True) == wanted.encode(text, add_bos=True), text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-3], "not a SentencePiece model, or corrupt"),
        (lambda data: b"\x0b" + data, "not a SentencePiece model, or corrupt"),
        (lambda data: b"\xff" * 20, "not a SentencePiece model, or corrupt"),
        (lambda data: _message((1, 7)), "not a SentencePiece model, or corrupt"),
        (lambda data: _message((1, _message((2, 3)))), "not a SentencePiece model, or corrupt"),
        (lambda data: data + _message((2, _message((3, 3)))), "neither unigrams, nor BPE"),
        (lambda data: data + _message((3, _message((2, b"nfkc")))), "neither unigrams, nor BPE"),
    ],
)
def test_files_that_are_no_sentencepiece_model(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    pieces = [(1, _message((1, b"a"), (2, -1.0), (3, 1)))]
    data = _message(*pieces, (2, _message((3, 2))))
    path = tmp_path / "tokenizer.model"
    path.write_bytes(change(data))
    with pytest.raises(SafetensorsError, match=message):
        sentencepiece_metadata(path, {})
    path.write_bytes(data)
    added = {"9": {"content": "\x1b[1m"}, "\x1b": {}}
    for number, token in added.items():
        with pytest.raises(SafetensorsError) as caught:
            sentencepiece_metadata(path, {"added_tokens_decoder": {number: token}})
        assert str(caught.value).isprintable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentencepiece, "TOKENS", replace(sentencepiece.TOKENS, most=2))
        path.write_bytes(4 * data + b"\xff")  # too many, before the end is read
        with pytest.raises(SafetensorsError, match="3 tokens of a vocabulary, at most 2"):
            sentencepiece_metadata(path, {})
        path.write_bytes(data)
    for added in ({"9": {"content": "x"}}, {"x": {"content": "x"}}, {"1": {"content": 3}}):
        with pytest.raises(SafetensorsError, match="added token"):
            sentencepiece_metadata(path, {"added_tokens_decoder": added})


@pytest.mark.parametrize("end", [None, []])
def test_roles_of_the_configuration_where_generation_has_none(
    data: Path, tmp_path: Path, end: object
) -> None:
    folder = Path(shutil.copytree(data / "safetensors" / "llama-bf16", tmp_path / "copy"))
    said = {"eos_token_id": end, "bos_token_id": None}
    (folder / "generation_config.json").write_text(json.dumps(said))
    (folder / "tokenizer_config.json").unlink()
    found = _tokenizer(folder, {"eos_token_id": [2, 1], "bos_token_id": 3})
    assert (found.end_ids, found.bos_id) == ({1, 2}, 3)


def test_a_template_in_any_of_its_files(data: Path, tmp_path: Path) -> None:
    """The newest kind of file counts."""
    folder = Path(shutil.copytree(data / "safetensors" / "llama-bf16", tmp_path / "copy"))

    def template() -> object:
        return text_metadata(folder, {}).get("tokenizer.chat_template")

    (folder / "chat_template.jinja").unlink()
    assert template() is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    assert template() == "{{ 1 }}"
    several = [
        {"name": "tool_use", "template": "{{ 2 }}"},
        {"name": "default", "template": "{{ 3 }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert template() == "{{ 3 }}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 4 }}"}))
    assert template() == "{{ 4 }}"
    (folder / "chat_template.jinja").write_text("{{ 5 }}")
    assert template() == "{{ 5 }}"


def test_a_vocabulary_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SafetensorsError, match="no such file"):
        is_tiktoken(tmp_path / "tiktoken.model")


def test_tiktoken(demo_file: Path, tmp_path: Path) -> None:
    lines, added = [], {}
    with Gguf(demo_file) as file:
        types = np.asarray(file.metadata["tokenizer.ggml.token_type"])
        for number, token in enumerate(file.metadata["tokenizer.ggml.tokens"]):
            if types[number] == 1:
                raw = b"".join(BYTE_ALPHABET[char] for char in token)
                lines.append(base64.b64encode(raw) + b" %d" % number)
            else:
                added[str(number)] = {"content": token, "special": types[number] == 3}
        expected = Tokenizer.of(file)
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    settings = {"added_tokens_decoder": json.loads(json.dumps(added, default=bool))}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = _tokenizer(tmp_path, {"model_type": "qwen3"})
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text), text


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"YQ==", b"YQ== x\n", b"YQ== 0\nYQ== 1\n", b"!! 0\n", b"YQ== 99999999\n"),
        *(b"YQ== 0\nYg== 0\n", b"YQ== 0000000001\n", b"YQ== -1\n", b"YQ== 1 1\n"),
    ],
)
def test_files_that_are_no_tiktoken_vocabulary(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(text)
    with pytest.raises(SafetensorsError):
        tiktoken_metadata(path, {}, "qwen3")
    path.write_bytes(b"YQ== 0\n")
    with pytest.raises(UnsupportedError, match="how model_type 'gpt2' cuts text"):
        tiktoken_metadata(path, {}, "gpt2")
    path.write_bytes(base64.b64encode(b"a" * 4000) + b" 0\n" + b"".join(
        base64.b64encode(bytes([n]) * 4000) + b" %d\n" % (n + 1) for n in range(40)))  # fmt: skip
    with pytest.raises(SafetensorsError, match="too long to find their merges"):
        tiktoken_metadata(path, {}, "qwen3")
