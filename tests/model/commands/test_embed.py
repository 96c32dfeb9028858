"""`urdir embed`, and `urdir batch` of an encoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.model.tiny_encoder import HIDDEN, write_encoder
from urdir.model.engine.engine import Engine

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("embed") / "tiny.gguf")


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("rank") / "tiny.gguf", ranks=True)


def test_embeddings_of_texts_and_tokens(tmp_path: Path, cli: Cli, encoder: Path) -> None:
    output, texts = tmp_path / "out.npy", ["a warp", "the weft crosses ."]
    code, out, _ = cli("embed", encoder, *texts, "-o", output, "--json", "-dev", "emulator")
    assert code == 0
    assert json.loads(out) == {"output": str(output), "shape": [2, HIDDEN]}
    with Engine.open(encoder, device="emulator") as engine:
        wanted = engine.embed(texts)
        tokens = ",".join(map(str, engine.tokenizer.encode_whole(texts[1])))
    np.testing.assert_array_equal(np.load(output), wanted)
    code, *_ = cli("embed", encoder, "--tokens", tokens, "-o", output, "-dev", "emulator")
    assert code == 0
    np.testing.assert_allclose(np.load(output), wanted[1:], atol=2e-3)


def test_scores_of_documents(tmp_path: Path, cli: Cli, ranker: Path) -> None:
    output, documents = tmp_path / "out.npy", ["the weft", "cotton"]
    given = ("embed", ranker, *documents, "--query", "a warp ?", "-dev", "emulator", "-o", output)
    assert cli(*given)[0] == 0
    with Engine.open(ranker, device="emulator") as engine:
        wanted = engine.rerank("a warp ?", documents)
    np.testing.assert_array_equal(np.load(output)[:, 0], wanted)
    code, out, _ = cli(*given[:-2])
    assert code == 0
    np.testing.assert_array_equal(np.array(out.split(), np.float32), wanted)


def test_without_a_file_the_rows_are_printed(cli: Cli, encoder: Path) -> None:
    given = ("embed", encoder, "a warp", "the weft", "-dev", "emulator")
    with Engine.open(encoder, device="emulator") as engine:
        wanted = engine.embed(["a warp", "the weft"])
    lines = cli(*given)[1].splitlines()
    rows = np.array([line.split() for line in lines], np.float32)
    np.testing.assert_array_equal(rows, wanted)
    rows = np.array(json.loads(cli(*given, "--json")[1])["rows"], np.float32)
    np.testing.assert_array_equal(rows, wanted)


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ((), 2, "give texts"),
        (("a", "--tokens", "5"), 2, "give texts"),
        (("--tokens", "5", "--query", "a"), 2, "--query"),
        (("a", "--query", "a", "--pooling", "mean"), 2, "--pooling"),
        (("--tokens", "99"), 2, "vocabulary of 16"),
        (("a", "-c", "41"), 2, "1 to 40"),
        (("a", "--pooling", "rank"), 1, "no scores"),
        (("a " * 60,), 1, "40 fit"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, cli: Cli, encoder: Path, given: tuple[str, ...], code: int, says: str
) -> None:
    output = tmp_path / "out.npy"
    found, _, err = cli("embed", encoder, *given, "-o", output, "-dev", "emulator")
    assert says in err
    assert found == code
    assert not output.exists()


def test_a_batch_of_an_encoder(tmp_path: Path, cli: Cli, encoder: Path) -> None:
    asked, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text(
        json.dumps({"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "a warp"}})
    )
    given = ("batch", asked, answers, "-m", encoder, "--device", "emulator")
    assert cli(*given)[0] == 0
    (answer,) = map(json.loads, answers.read_text().splitlines())
    assert len(answer["response"]["body"]["data"][0]["embedding"]) == HIDDEN
