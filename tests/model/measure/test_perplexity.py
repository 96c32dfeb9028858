"""Perplexity against llama.cpp's, and KL divergence from a base model's file."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from urdir.model.engine.engine import Engine
from urdir.model.errors import ModelError
from urdir.model.measure.base_logits import BaseLogits, packed, writing
from urdir.model.measure.divergence import Divergence
from urdir.model.measure.perplexity import (
    Chunk,
    Estimate,
    cut,
    log_probabilities,
    logits_of_chunks,
    losses_of_chunks,
)

Cli = Callable[..., tuple[int, str, str]]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, of rows."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.fixture
def golden_model(data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "perplexity.gguf"
    path.write_bytes(lzma.decompress((data / "perplexity" / "perplexity.gguf.xz").read_bytes()))
    return path


def test_losses_are_those_of_llama_cpp(data: Path, golden_model: Path, device_name: str) -> None:
    """Of the beginning on the emulator; the whole tool's figures on a GPU. The chunks that share
    steps, of which the last is alone, are those that run by themselves."""
    with np.load(data / "perplexity" / "perplexity.npz") as file:
        golden = {name: file[name] for name in file.files}
    tokens = golden["tokens"].tolist()
    size, together = (10, 2) if device_name == "emulator" else (128, 3)
    wanted = {"context": size, "exact": True, "kv_dtype": "f32", "cache_folder": None}
    with Engine.open(golden_model, device=device_name, sequences=together, **wanted) as engine:
        chunks = cut(tokens, size, None, 4 if size == 128 else 3)
        rows = list(logits_of_chunks(engine.session, chunks))
        alone = engine.logits(chunks[1].tokens)[size // 2 : -1]
        of_prompts = list(losses_of_chunks(engine.session, chunks))
    np.testing.assert_allclose(rows[1], alone, atol=1e-4)
    losses = [chunk.losses(of) for chunk, of in zip(chunks, rows, strict=True)]
    np.testing.assert_allclose(losses[0], golden["nll"][size // 2 : size - 1], rtol=1e-5)
    np.testing.assert_allclose(of_prompts, losses, atol=5e-5)
    if size == 128:
        found = [Estimate.of(np.concatenate(losses[:n])).value for n in (1, 2, 3, 4)]
        np.testing.assert_allclose(found, golden["tool_chunk_perplexity"], rtol=1e-5)


def test_a_text_is_cut_into_whole_chunks() -> None:
    tokens = list(range(100, 145))
    chunks = cut(tokens, 10, 1)
    assert [chunk.tokens[0] for chunk in chunks] == [1] * 4
    assert [token for chunk in chunks for token in chunk.tokens[1:]] == [
        token for token in tokens[:40] if token % 10
    ]
    assert (chunks[0].first, chunks[0].scored) == (5, (106, 107, 108, 109))
    assert (Chunk(tuple(range(7))).first, Chunk(tuple(range(7))).scored) == (3, (4, 5, 6))
    assert [chunk.tokens for chunk in cut(tokens, 11, None, 1)] == [tuple(tokens[:11])]
    with pytest.raises(ModelError, match="45 tokens: 46 are needed"):
        cut(tokens, 23, None)
    losses = np.random.default_rng(1).uniform(0, 9, 63)
    estimate = Estimate.of(losses)
    assert estimate.value == pytest.approx(np.exp(losses.mean()))
    assert estimate.error == pytest.approx(estimate.value * losses.std(ddof=1) / 63**0.5)


def test_divergence_is_that_of_numpy_and_files_keep_it(tmp_path: Path) -> None:
    """With an odd vocabulary; the file rounds to 16 bits and cuts 16 below the highest."""
    random = np.random.default_rng(7)
    vocab, chunks = 37, [Chunk(tuple(random.integers(0, 37, 9).tolist())) for _ in range(3)]
    pairs = [random.normal(0, 2, (2, 4, vocab)).astype(np.float32) for _ in chunks]
    path = tmp_path / "base.kld"
    with writing(path, chunks, vocab) as file:
        for base, _ in pairs:
            file.write(packed(base).tobytes())
    assert [each.name for each in tmp_path.iterdir()] == ["base.kld"]
    parts, kl, losses = [], [], []
    with BaseLogits.open(path) as saved:
        assert (saved.context, saved.vocab, saved.chunks) == (9, vocab, chunks)
        for chunk, rows, (base, other) in zip(chunks, saved.rows(), pairs, strict=True):
            p, q = _log_softmax(base), _log_softmax(other)
            np.testing.assert_allclose(rows, p, atol=16 / 65535)
            np.testing.assert_allclose(log_probabilities(other[0]), q[0])
            parts.append(Divergence.of(chunk, rows, other))
            kl.append((np.exp(p) * (p - q)).sum(1))
            losses.append(-q[np.arange(4), chunk.scored])
    table = Divergence.joined(parts).table()
    assert table["kl_mean"] == pytest.approx(np.mean(kl), abs=5e-4)
    assert table["kl_100%"] == pytest.approx(np.max(kl), abs=1e-3)
    assert table["perplexity"] == pytest.approx(np.exp(np.mean(losses)))
    same = [base.argmax(1) == other.argmax(1) for base, other in pairs]
    assert table["same_top"] == np.mean(same)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ModelError, match="was not written whole"):
        BaseLogits.open(path)
    path.write_bytes(b"GGUF" * 9)
    with pytest.raises(ModelError, match="no saved log-probabilities"):
        BaseLogits.open(path)


def test_the_cache_has_the_types_that_are_asked_for(cli: Cli, golden_model: Path) -> None:
    """The figure is that of an engine with such a cache, whose keys and values are rounded."""
    tokens = np.random.default_rng(4).integers(0, 128, 12).tolist()
    given = ("perplexity", golden_model, "--tokens", ",".join(map(str, tokens)), "-c", "6")
    found = {}
    for flags in ((), ("-ctk", "q4_0"), ("-ctv", "q4_0")):
        code, out, _ = cli(*given, "--exact", *flags, "--json")
        assert code == 0
        found[flags] = json.loads(out)["perplexity"]
        with Engine.open(
            golden_model,
            device="emulator",
            context=6,
            exact=True,
            kv_dtype="q4_0" if "-ctk" in flags else "f32",
            value_dtype="q4_0" if "-ctv" in flags else "f32",
        ) as engine:
            losses = [-engine.logprobs(tokens[at : at + 6])[-2:] for at in (0, 6)]
        assert found[flags] == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-5), flags
    assert len({round(of, 1) for of in found.values()}) == 3


def test_a_model_does_not_diverge_from_itself(cli: Cli, golden_model: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    tokens = ",".join(map(str, random.integers(0, 128, 13)))
    base = tmp_path / "base.kld"
    asked = ("perplexity", golden_model, "--tokens", tokens, "-c", "6")
    code, out, _ = cli(*asked, "--save-logits", base, "--json")
    assert code == 0
    figures = json.loads(out)
    assert figures["tokens"] == 4
    code, out, _ = cli("perplexity", golden_model, "--kl-divergence", base, "--json")
    assert code == 0
    table = json.loads(out)
    assert table["perplexity"] == pytest.approx(figures["perplexity"])
    assert table["base_perplexity"] == pytest.approx(figures["perplexity"], rel=1e-3)
    assert abs(table["kl_mean"]) < 1e-4
    assert table["same_top"] == 1
    code, _, err = cli("perplexity", "demo", "--kl-divergence", base)
    assert code == 1
    assert "the same vocabulary" in err
    code, _, err = cli(*asked[:-1], "7")
    assert code == 1
    assert "13 tokens: 14 are needed" in err
