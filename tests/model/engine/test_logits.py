"""The logits of every position of a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.logits import logits_after
from urdir.model.engine.realizar import EagerSteps
from urdir.model.errors import ContextFullError, ModelError, SettingsError

TOKENS = [3, 141, 59, 26, 5, 9, 2, 6, 77, 13]


@pytest.fixture(scope="module")
def engine(device_name: str) -> Iterator[Engine]:
    path = Path(__file__).parents[2] / "data" / "golden" / "nano-llama-q8_0.gguf"
    with Engine.open(path, device=device_name, context=len(TOKENS)) as opened:
        yield opened


def test_they_are_those_of_single_steps(engine: Engine) -> None:
    """Bit for bit, up to the end of the context."""
    rows = [*logits_after(engine.session, TOKENS[:6], TOKENS[6:])]
    with EagerSteps(engine.session) as eager:
        eager.feed(TOKENS[:6])
        expected = [eager.logits()[0]]
        for token in TOKENS[6:]:
            eager.feed([token])
            expected.append(eager.logits()[0])
    np.testing.assert_array_equal(np.stack(rows), np.stack(expected))


def test_what_does_not_fit_or_is_no_token_is_refused(engine: Engine) -> None:
    size = engine.config.vocab_size
    with pytest.raises(ContextFullError, match="11 tokens exceed the context of 10 by 1"):
        next(logits_after(engine.session, TOKENS, [1]))
    for prompt, given in (([size], []), ([1], [size])):
        with pytest.raises(ModelError, match=f"token id {size} is outside the vocabulary"):
            next(logits_after(engine.session, prompt, given))


def test_an_engine_gives_those_of_a_text_or_its_tokens(device_name: str) -> None:
    with Engine.open(device=device_name, context=16) as engine:
        tokens = engine.tokenize("Once upon")
        rows = engine.logits("Once upon")
        assert rows.shape == (len(tokens), engine.config.vocab_size)
        expected = [*logits_after(engine.session, tokens[:1], tokens[1:])]
        np.testing.assert_array_equal(rows, np.stack(expected))
        np.testing.assert_array_equal(engine.logits(tokens), rows)
        assert engine.detokenize(tokens) == "Once upon"
        with pytest.raises(ModelError, match="the prompt is empty"):
            engine.logits([])
        losses = np.logaddexp.reduce(rows[:-1].astype(np.float64), axis=1) - [
            row[token] for row, token in zip(rows.astype(np.float64), tokens[1:], strict=False)
        ]
        # of prompts the device has f32 sums
        np.testing.assert_allclose(engine.logprobs("Once upon"), -losses, atol=1e-5)
        assert engine.perplexity(tokens) == pytest.approx(np.exp(losses.mean()), rel=1e-5)
        for token in (-1, engine.config.vocab_size):  # also the last one, which is only looked up
            with pytest.raises(ModelError, match=f"token id {token} is outside the vocabulary"):
                engine.logprobs([*tokens, token])
        with pytest.raises(SettingsError, match=r"^decoder: its tokens are the text"):
            engine.logits(tokens, decoder=[1])
        with pytest.raises(SettingsError, match="is neither a text nor a list of token ids"):
            engine.tokenize(b"Once")
        with pytest.raises(ModelError, match=r"^1 tokens: the first has no probability"):
            engine.perplexity(tokens[:1])
