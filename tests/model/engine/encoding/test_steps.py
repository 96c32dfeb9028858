"""Steps of texts: as many short ones as there are rows, more than a step takes, wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.tiny_encoder import CONTEXT, HIDDEN, write_encoder
from urdir.model.engine.encoding import encoder as encoder_module
from urdir.model.engine.encoding import results, texts
from urdir.model.engine.encoding.budget import DEFAULT_TEXT, EncoderSettings
from urdir.model.engine.encoding.encoder import Encoder
from urdir.model.engine.engine import Engine
from urdir.model.engine.text_steps import LARGEST_STEP, MOST_TEXTS, EncodeShape, text_bucket
from urdir.model.errors import ContextFullError, ModelError, SettingsError, UnsupportedError
from urdir.model.families.placement import Placement
from urdir.model.families.pooling import Pooling
from urdir.model.memory.draft_settings import DraftSettings
from urdir.ptxgen.kernels.pool_rows import PoolRows


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_encoder(tmp_path_factory.mktemp("steps") / "tiny.gguf")
    with Engine.open(path, device="emulator", chunk=64, cache_folder=None) as opened:
        yield opened


@pytest.mark.parametrize(("rows", "texts"), [(72, 72), (72, 200), (64, 60)])
def test_texts_of_one_token_fill_a_step(engine: Engine, rows: int, texts: int) -> None:
    """There are as many texts as rows; no power of four is."""
    wanted = engine.embed([[5], [6]], normalize=False)
    with Encoder(engine.device, engine.weights, EncoderSettings(CONTEXT, rows)) as encoder:
        found = encoder.encode([[5 + number % 2] for number in range(texts)])
    assert found.shape == (texts, HIDDEN)
    np.testing.assert_allclose(found, np.resize(wanted, (texts, HIDDEN)), atol=2e-3)


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_results_of_steps_in_flight_stay_in_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pooling: Pooling
) -> None:
    """Copies of none are queued, or (one text fits, two do not) those of some, or of two steps."""
    given = [[5 + i, *[6] * (3 * i % 7)] for i in range(9)]
    found = []
    with Encoder(engine.device, engine.weights, EncoderSettings(CONTEXT, 8)) as encoder:
        steps = [len(some.tokens) for some in encoder._steps(given)]
        assert len(steps) > 3
        assert len(set(steps)) > 1
        wanted = [encoder.encode([text], pooling) for text in given]
        for half in (8, 4 * HIDDEN, 1 << 16):
            monkeypatch.setattr(results, "_HALF_BYTES", half)
            found.append(encoder.encode(given, pooling))
    for each in found:
        np.testing.assert_allclose(each, np.concatenate(wanted), atol=2e-3)
    assert not np.allclose(wanted[0][0], wanted[1][0], atol=2e-2)  # order would show


def test_texts_are_asked_for_while_steps_are_in_flight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is queued when the next text does not fit, before the ones after are there."""
    happened: list[str] = []

    def asked() -> Iterator[list[int]]:
        for number in range(5):
            happened.append(f"text {number}")
            yield [5 + number] * 8

    with Encoder(engine.device, engine.weights, EncoderSettings(CONTEXT, 16)) as encoder:
        launch = encoder._graphs.launch

        def launched(shape: EncodeShape) -> None:
            happened.append(f"step of {shape.rows}")
            launch(shape)

        monkeypatch.setattr(encoder._graphs, "launch", launched)
        found = encoder.encode(asked())
    first, second, third = "step of 16", "step of 16", "step of 8"
    names = [f"text {number}" for number in range(5)]
    assert happened == [*names[:3], first, *names[3:], second, third]
    wanted = engine.embed([[5 + number] * 8 for number in range(5)], normalize=False)
    np.testing.assert_allclose(found, wanted, atol=2e-3)


def test_first_steps_of_texts_that_are_made_meanwhile_are_small(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has twice the rows of the one before; a longer text is a step of its own."""
    monkeypatch.setattr(encoder_module, "FIRST_ROWS", 16)
    lengths = [8] * 15 + [3]
    given = [[5 + number % 4] * length for number, length in enumerate(lengths)]
    with Encoder(engine.device, engine.weights, EncoderSettings(CONTEXT, 64)) as encoder:
        small = [len(some.tokens) for some in encoder._steps(iter(given))]
        assert small == [2, 4, 8, 2]
        assert [len(some.tokens) for some in encoder._steps(given)] == [8, 8]
        long = [[5] * CONTEXT, [6] * 8, [7] * 8]
        assert [some.rows for some in encoder._steps(iter(long))] == [CONTEXT, 16]
        found = encoder.encode(iter(given))
        np.testing.assert_allclose(found, encoder.encode(given), atol=2e-3)


def test_a_text_that_is_refused_leaves_no_step_behind(engine: Engine) -> None:
    given = [[5 + number % 4] * 8 for number in range(9)]
    with Encoder(engine.device, engine.weights, EncoderSettings(CONTEXT, 16)) as encoder:
        wanted = encoder.encode(given)
        with pytest.raises(SettingsError, match=r"^text 7 "):
            encoder.encode([*given[:7], [-1]])
        np.testing.assert_array_equal(encoder.encode(given), wanted)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [([], SettingsError), ([5] * (CONTEXT + 1), ContextFullError), (5, SettingsError)],
)
def test_a_text_of_a_wrong_length_is_refused_before_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, wrong: Any, error: type[Exception]
) -> None:
    """Behind more texts than a step takes, beside strings in `Engine.embed`."""
    given = [[5 + number % 4] * 8 for number in range(9)]
    launched: list[EncodeShape] = []
    with Encoder(engine.device, engine.weights, EncoderSettings(CONTEXT, 16)) as encoder:
        monkeypatch.setattr(encoder._graphs, "launch", launched.append)
        monkeypatch.setattr(engine, "_encoder", encoder)
        with pytest.raises(error, match=r"^text 9 "):
            encoder.encode([*given, wrong])
        with pytest.raises(error, match=r"^text 10 "):
            engine.embed(["the warp", *given, wrong])
    assert not launched


def test_texts_are_cut_some_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside tokens, and in their order."""
    given = ["the warp", "a [SEP] cotton", [5, 6], "", "threads?", "32 wefts", [7]]
    wanted = [[2, 9, 5, 3], [2, 4, 1, 1, 1, 12, 3], [5, 6], [2, 3], [2, 8, 14, 3]]
    wanted += [[2, 7, 10, 13, 3], [7]]
    for together in (1, 9, 1 << 14):
        monkeypatch.setattr(texts, "_TOGETHER", together)
        found = [list(tokens) for tokens in texts.tokens_of(lambda: engine.tokenizer, given)]
        assert found == wanted
    alone = [engine.embed([text])[0] for text in given]
    np.testing.assert_allclose(engine.embed(given), alone, atol=2e-3)


def test_graphs_that_were_used_last_are_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at least, however little they may take."""
    wanted = [engine.embed([[5] * count]) for count in (3, 12)]
    monkeypatch.setattr(encoder_module, "GRAPH_BYTES", 1)
    with Encoder(engine.device, engine.weights, EncoderSettings(CONTEXT, 72)) as encoder:
        monkeypatch.setattr(engine, "_encoder", encoder)
        kept = []
        for count, of in ((3, wanted[0]), (12, wanted[1]), (3, wanted[0])):
            np.testing.assert_array_equal(engine.embed([[5] * count]), of)
            kept.append([shape.rows for shape in encoder._graphs._graphs])
    assert kept == [[8], [16], [8]]


@pytest.mark.parametrize("rows", [8, 72, 8192, 131072])
def test_a_step_has_no_more_texts_than_rows_and_than_kernels_take(rows: int) -> None:
    most = min(rows, MOST_TEXTS)
    counts = [text_bucket(texts, rows) for texts in range(1, most + 1)]
    assert all(texts <= of <= most for texts, of in enumerate(counts, 1))
    assert len(set(counts)) < 9
    PoolRows(cols=8, height=rows, rows=most)  # refuses more than a grid has


def test_texts_are_as_long_as_kernels_have_rows(engine: Engine) -> None:
    long = replace(engine.config, context_length=131072)
    for settings in (
        EncoderSettings.of(long, 0),
        EncoderSettings.of(long, LARGEST_STEP),
        EncoderSettings.of(long, None, 100_000),
    ):
        assert settings.rows == LARGEST_STEP
    assert EncoderSettings.of(long, None).context == DEFAULT_TEXT
    with pytest.raises(SettingsError, match="131072 tokens: up to"):
        EncoderSettings.of(long, 131072)


@pytest.mark.parametrize("given", [[1, 2, 3], [[]], [[16]], [[-1]], [[2.5]], [None]])
def test_texts_that_are_none_are_refused(engine: Engine, given: Any) -> None:
    with pytest.raises(SettingsError, match=r"^text 0 "):
        engine.embed(given)


@pytest.mark.parametrize("given", [None, 5])
def test_what_is_no_list_of_texts_is_named(engine: Engine, given: Any) -> None:
    with pytest.raises(SettingsError, match=f"texts are {given}: expected a text or several"):
        engine.embed(given)
    with pytest.raises(SettingsError, match=f"documents are {given}: expected a list of texts"):
        engine.rerank("a", given)
    for pairs in (given, [given], "ab", ["ab"], [("a",)], [("a", given)]):
        with pytest.raises(SettingsError, match=r"pairs are .*: expected two texts each"):
            engine.score(pairs)
    with pytest.raises(SettingsError, match="documents are 'ab': expected a list of texts"):
        engine.rerank("a", "ab")


def test_an_engine_says_that_it_is_closed(tmp_path: Path) -> None:
    with Engine.open(
        write_encoder(tmp_path / "tiny.gguf"), device="emulator", cache_folder=None
    ) as closed:
        assert closed.embed([[1, 2]]).shape[0] == 1
    with pytest.raises(ModelError, match="the engine is closed"):
        closed.embed([[1, 2]])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"placement": Placement(gpu_layers=1)}, "host memory"),
        ({"drafts": DraftSettings()}, "drafts"),
        ({"max_adapters": 2}, "adapters"),
        ({"gpus": 2}, "several GPUs"),
    ],
)
def test_options_without_effect_are_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    path = write_encoder(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedError, match=f"embeddings with .*{says}"):
        Engine.open(path, device="emulator", cache_folder=None, **options)
