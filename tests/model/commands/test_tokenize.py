"""`urdir tokenize` and `urdir detokenize`: text to token ids and back, without a device."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.text.tokenizer import Tokenizer

Cli = Callable[..., tuple[int, str, str]]

TEXT = "Sort 31, 7, 19. Schön: 漢\n"


@pytest.mark.quick
def test_ids_come_back_as_the_text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an argument, of stdin, and of a file of ids; pieces that are no characters are bytes."""
    expected = Tokenizer.of(Gguf(demo_model())).encode(TEXT, add_bos=True)
    code, ids, _ = cli("tokenize", "demo", TEXT)
    assert (code, ids) == (0, ",".join(map(str, expected)) + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert cli("tokenize", "-m", "demo") == (0, ids, "")
    monkeypatch.setattr("sys.stdin", io.StringIO(ids))
    assert cli("detokenize", "demo") == (0, TEXT + "\n", "")
    code, out, _ = cli("tokenize", "demo", TEXT, "--json")
    assert out.isascii()  # a terminal may have no other characters
    found = json.loads(out)
    assert [token["id"] for token in found["tokens"]] == expected
    assert found["count"] == len(expected)
    raw = [piece.encode() if isinstance(piece := token["piece"], str) else bytes(piece)
           for token in found["tokens"]]  # fmt: skip
    assert b"".join(raw).decode() == TEXT


def test_control_tokens_are_parsed_unless_refused(cli: Cli) -> None:
    tokenizer = Tokenizer.of(Gguf(demo_model()))
    text, token = next(iter(tokenizer.control_tokens().items()))
    assert cli("tokenize", "demo", text, "--no-bos")[1] == f"{token}\n"
    ids = cli("tokenize", "demo", text, "--no-bos", "--no-parse-special")[1]
    assert [int(word) for word in ids.split(",")] == tokenizer.encode(text)
    assert json.loads(cli("detokenize", "demo", str(token), "--json")[1]) == {"text": text}


def test_bad_ids_are_refused(cli: Cli, tmp_path: Path) -> None:
    assert cli("detokenize", "demo", "1,x")[0] == 2
    code, _, err = cli("detokenize", "demo", "1,2048")
    assert code == 1
    assert "2048 is outside the vocabulary" in err
    code, _, err = cli("detokenize", "demo", f"@{tmp_path / 'none.txt'}")
    assert code == 1
    assert "none.txt: cannot be read" in err


def test_logits_of_a_text_are_those_of_its_tokens(cli: Cli, tmp_path: Path) -> None:
    ids = cli("tokenize", "demo", "Once upon")[1].strip()
    outputs = [tmp_path / "text.npy", tmp_path / "tokens.npy"]
    for given, output in zip((("-p", "Once upon"), ("--tokens", ids)), outputs, strict=True):
        assert cli("logits", "demo", *given, "--output", output)[0] == 0
    first, second = map(np.load, outputs)
    assert first.shape == (len(ids.split(",")), 2048)
    np.testing.assert_array_equal(first, second)
    assert cli("logits", "demo", "-p", "", "--output", outputs[0])[0] == 2
    assert cli("logits", "demo", "--output", outputs[0])[0] == 2
