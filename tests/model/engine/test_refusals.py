"""Files that are refused before a device is opened, one of each kind of what can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.group import Group
from urdir.model.engine.engine import Engine
from urdir.model.errors import (
    ConfigError,
    GgufError,
    ModelError,
    NoTemplateError,
    TemplateError,
    TokenizerError,
    UnsupportedError,
)
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import StringArray

Metadata = dict[str, Any]
Tensors = dict[str, tuple[int, tuple[int, ...], bytes]]
Change = Callable[[Metadata, Tensors], object]
Maker = Callable[[Change], Path]

F32, I8, BYTE = 0, 24, 6
EMBEDDING, NORM = "token_embd.weight", "output_norm.weight"
TEMPLATE = "tokenizer.chat_template"


class OpenedError(Exception):
    """A device was to be opened."""


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a device gets `OpenedError`."""

    def refuse(*_: object, **__: object) -> None:
        raise OpenedError

    for owner, name in ((Device, "open"), (Device, "__init__"), (Group, "open")):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture
def changed(demo_file: Path, make_gguf: Callable[..., Path]) -> Maker:
    """Writes the demo model with changes."""

    def make(change: Change) -> Path:
        demo = Gguf(demo_file)
        metadata: Metadata = {
            key: value.decoded() if isinstance(value, StringArray) else value
            for key, value in demo.metadata.items()
        }
        tensors: Tensors = {
            t.name: (t.type_id, t.shape, t.data[:].tobytes()) for t in demo.tensors.values()
        }
        change(metadata, tensors)
        return make_gguf(metadata, tensors)

    return make


def given(**values: Any) -> Change:
    """Other values of a vocabulary's keys; None leaves a key out."""

    def change(metadata: Metadata, tensors: Tensors) -> None:
        for name, value in values.items():
            metadata.pop(f"tokenizer.ggml.{name}", None)
            if value is not None:
                metadata[f"tokenizer.ggml.{name}"] = value

    return change


def key(name: str, value: Any) -> Change:
    """Another value of a key."""
    return lambda metadata, tensors: metadata.update({name: value})


def tensor(name: str, type_id: int, shape: tuple[int, ...], nbytes: int) -> Change:
    """Another tensor of a name."""
    return lambda metadata, tensors: tensors.update({name: (type_id, shape, bytes(nbytes))})


def each(key: str, change: Callable[[Any], Any]) -> Change:
    """A vocabulary's value changed."""

    def apply(metadata: Metadata, tensors: Tensors) -> None:
        name = f"tokenizer.ggml.{key}"
        metadata[name] = change(metadata[name])

    return apply


def sentence_piece(metadata: Metadata, tensors: Tensors) -> None:
    """The vocabulary of another kind, with scores."""
    count = len(metadata["tokenizer.ggml.tokens"])
    given(model="llama", scores=np.zeros(count, np.float32))(metadata, tensors)


def both(first: Change, second: Change) -> Change:
    def apply(metadata: Metadata, tensors: Tensors) -> None:
        first(metadata, tensors)
        second(metadata, tensors)

    return apply


def with_item(place: int, value: Any) -> Callable[[Any], Any]:
    """A list or array with one item changed."""

    def change(items: Any) -> Any:
        found = items.copy()
        found[place] = value
        return found

    return change


ARCHITECTURE = {
    "unknown": (key("general.architecture", "nobody"), UnsupportedError, "'nobody'"),
    "absent": (lambda m, t: m.pop("general.architecture"), ConfigError, "architecture"),
    "no model": (key("general.type", "adapter"), UnsupportedError, "LoRA"),
    "of images": (key("general.architecture", "clip"), UnsupportedError, "projector"),
    "of millions of characters": (
        key("general.architecture", "x" * 5_000_000),
        ConfigError,
        "5,000,000 characters of a name",
    ),
    "no number": (key("general.architecture", 7), ConfigError, "general.architecture"),
}
TENSORS = {
    "missing": (lambda m, t: t.pop(NORM), ConfigError, f"'{NORM}'.*missing"),
    "too many": (tensor("more.weight", F32, (32,), 128), UnsupportedError, "'more.weight'"),
    "of a wrong shape": (tensor(NORM, F32, (32,), 128), ConfigError, f"'{NORM}' has shape"),
    "of a type without use": (
        lambda m, t: t.update({NORM: (I8, t[NORM][1], bytes(t[NORM][1][0]))}),
        UnsupportedError,
        f"'{NORM}' has type I8",
    ),
    "of an unknown type": (
        lambda m, t: t.update({NORM: (99, *t[NORM][1:])}),
        UnsupportedError,
        "unknown type 99",
    ),
    "cut short": (
        lambda m, t: t.update({[*t][-1]: (*t[[*t][-1]][:2], b"")}),
        GgufError,
        "truncated or corrupt",
    ),
}
VOCABULARY = {
    "no tokens": (given(tokens=[]), TokenizerError, "tokens is empty"),
    "tokens missing": (given(tokens=None), ConfigError, "tokenizer.ggml.tokens' is missing"),
    "tokens of a wrong kind": (given(tokens=7), ConfigError, "tokenizer.ggml.tokens"),
    "a long token": (each("tokens", with_item(9, "a" * 4097)), TokenizerError, "4,097 bytes"),
    "more tokens than rows": (
        both(each("tokens", lambda x: [*x, "more"] * 2), given(token_type=None)),
        TokenizerError,
        f"rows of {EMBEDDING}",
    ),
    "types of few": (each("token_type", lambda x: x[:-1]), TokenizerError, "token_type has"),
    "types of a wrong kind": (given(token_type="x"), ConfigError, "token_type"),
    "a role beyond": (given(eos_token_id=1 << 30), TokenizerError, "eos_token_id is"),
    "a role of a wrong kind": (given(bos_token_id="x"), ConfigError, "bos_token_id"),
    "no boolean": (given(add_bos_token=3), ConfigError, "add_bos_token"),
    "merges missing": (given(merges=None), ConfigError, "merges' is missing"),
    "merges of a wrong kind": (given(merges=3.5), ConfigError, "merges"),
    "not a pair": (each("merges", with_item(7, "hello")), TokenizerError, "'hello' is not a pair"),
    "a long merge": (each("merges", with_item(7, "a " * 4097)), TokenizerError, "of a merge"),
    "a byte that is none": (
        both(
            given(pre="gemma4", model="gemma4"),
            both(
                each("tokens", with_item(9, "<0xZZ>")),
                each("token_type", with_item(9, BYTE)),
            ),
        ),
        TokenizerError,
        "not a byte token",
    ),
    "scores missing": (given(model="llama"), ConfigError, "scores' is missing"),
    "scores of few": (
        both(sentence_piece, each("scores", lambda x: x[:-1])),
        TokenizerError,
        "scores has",
    ),
    "a score that is none": (
        both(sentence_piece, each("scores", with_item(3, np.nan))),
        TokenizerError,
        "scores contains NaN",
    ),
    "a prefix of a wrong kind": (
        both(sentence_piece, given(add_space_prefix=1)),
        ConfigError,
        "add_space_prefix",
    ),
    "no unknown token": (
        both(sentence_piece, given(model="t5", unknown_token_id=1 << 20)),
        TokenizerError,
        "unknown_token_id",
    ),
    "a table that is none": (
        both(sentence_piece, given(model="t5", precompiled_charsmap=np.ones(3, np.uint8))),
        TokenizerError,
        "precompiled_charsmap",
    ),
    "bytes missing": (both(sentence_piece, given(model="plamo2")), TokenizerError, "<0x00>"),
}
KINDS = {
    "a tokeniser of an unknown kind": (given(model="gpt9"), UnsupportedError, "tokeniser 'gpt9'"),
    "no vocabulary": (given(model=None), TokenizerError, "no vocabulary"),
    "an unknown pre-tokeniser": (given(pre="nobody"), UnsupportedError, "'nobody'"),
}
TEMPLATES = {
    "an open block": (key(TEMPLATE, "{% for x in y %}"), TemplateError, "syntax error in line 1"),
    "an unknown filter": (key(TEMPLATE, "{{ x | nobody }}"), TemplateError, "nobody"),
    "an unknown statement": (key(TEMPLATE, "\n{% nobody %}"), TemplateError, "line 2"),
    "nested without end": (key(TEMPLATE, "{{" + "(" * 5000 + "}}"), TemplateError, "deeply"),
    "of a wrong kind": (key(TEMPLATE, 7), ConfigError, TEMPLATE),
}
TEMPLATES["no template"] = (
    # without the control tokens that tell the format
    both(
        lambda m, t: m.pop(TEMPLATE),
        each("tokens", lambda x: [token.replace("im_", "nn_") for token in x]),
    ),
    NoTemplateError,
    "no chat template",
)


def cases(kinds: dict[str, Any]) -> Any:
    return pytest.mark.parametrize(
        ("change", "error", "message"),
        kinds.values(),
        ids=[name.replace(" ", "-") for name in kinds],
    )


@cases({**ARCHITECTURE, **TENSORS, **VOCABULARY})
def test_before_a_device_is_opened(
    no_device: None, changed: Maker, change: Change, error: type[ModelError], message: str
) -> None:
    """Whether text is asked for or not."""
    path = changed(change)
    for text in (False, True):
        with pytest.raises(error, match=message) as caught:
            Engine.open(path, device="emulator", text=text)
        assert "\n" not in str(caught.value)


@cases({**KINDS, **TEMPLATES})
def test_what_a_conversation_lacks(
    no_device: None, changed: Maker, change: Change, error: type[ModelError], message: str
) -> None:
    """Without a conversation such a file is good."""
    path = changed(change)
    with pytest.raises(error, match=message):
        Engine.open(path, device="emulator", chat=True)
    with pytest.raises(OpenedError):
        Engine.open(path, device="emulator")


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
@pytest.mark.parametrize("kind", ["an open block", "no template"])
def test_the_command_line_refuses_a_template(
    no_device: None, changed: Maker, cli: Callable[..., tuple[int, str, str]], command: str,
    kind: str,
) -> None:  # fmt: skip
    change, _, message = TEMPLATES[kind]
    path = changed(change)
    words = {"run": ["-p", "Hello"], "serve": ["--port", "0", "--api-workers", "0"]}
    prompt = words.get(command, [])
    if command == "serve" and kind == "no template":  # there are completions
        with pytest.raises(OpenedError):
            cli(command, "-m", path, *prompt)
        return
    code, out, err = cli(command, "-m", path, *prompt)
    assert (code, out) == (1, "")
    assert message in err
    assert ("--chat-template NAME, urdir run --raw" in err) == (kind == "no template")
    if command == "run":
        for more in (["--raw"], ["--chat-template", "chatml"]):
            with pytest.raises(OpenedError):
                cli(command, "-m", path, *prompt, *more)


@pytest.mark.parametrize("command", ["run", "chat", "serve", "bench", "logits"])
def test_the_command_line_refuses_a_vocabulary(
    no_device: None, changed: Maker, cli: Callable[..., tuple[int, str, str]], command: str,
) -> None:  # fmt: skip
    change, _, message = VOCABULARY["not a pair"]
    words = {
        "run": ["-p", "Hello"], "serve": ["--port", "0", "--api-workers", "0"],
        "logits": ["--tokens", "1", "--output", "x.npy"],
    }.get(command, [])  # fmt: skip
    code, out, err = cli(command, "-m", changed(change), *words)
    assert (code, out) == (1, "")
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be used"), ('{"model": {"type": "Nobody"}}', "cannot be used"), ("[]", "used")],
)
def test_a_folder(no_device: None, data: Path, tmp_path: Path, text: str, message: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(data / "safetensors" / "llama-bf16", folder)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=message):
        Engine.open(folder, device="emulator")
    (folder / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    with pytest.raises(ModelError, match="nobody"):
        Engine.open(folder, device="emulator")


def test_a_good_file_is_opened(no_device: None, changed: Maker) -> None:
    path = changed(lambda metadata, tensors: None)
    for chat in (False, None, True):
        with pytest.raises(OpenedError):
            Engine.open(path, device="emulator", chat=chat)
