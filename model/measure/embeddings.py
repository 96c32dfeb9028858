"""Embeddings of many texts, timed: from tokens on the host to vectors there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.model.engine.encoding.encoder import Encoder
from urdir.model.measure.bench import PROFILED
from urdir.model.measure.profile import ProfileRow, summarise


@dataclass(frozen=True, slots=True)
class EmbedRow:
    """Embeddings of ``texts`` texts of ``tokens`` tokens: the median of some runs in ms, the best
    one, and tokens/s by the median."""

    texts: int
    tokens: int
    ms: float
    best_ms: float
    tokens_per_second: float


def embed_rows(
    encoder: Encoder, cases: Sequence[tuple[int, int]], repeats: int
) -> Iterator[EmbedRow]:
    """Time (texts, tokens of each), after a run that records the graphs."""
    pooling = encoder.embedding.pooling or "mean"
    for texts, tokens in cases:
        rng = np.random.default_rng(texts)
        batch = rng.integers(0, encoder.config.vocab_size, (texts, tokens)).tolist()
        encoder.encode(batch, pooling)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            encoder.encode(batch, pooling)
            seconds.append(time.perf_counter() - start)
        usual = median(seconds)
        yield EmbedRow(texts, tokens, 1e3 * usual, 1e3 * min(seconds), texts * tokens / usual)


def embed_profile(
    encoder: Encoder, device: Device, texts: int, tokens: int, bandwidth: float
) -> Sequence[ProfileRow]:
    """Time each launch of the first step of this many texts, by role; the median of a few runs."""
    count = max(1, min(texts, encoder.settings.rows // tokens))
    encoder.encode([[0] * tokens] * count, encoder.embedding.pooling or "mean")
    plan = encoder.plan([tokens] * count, encoder.embedding.pooling or "mean")
    bound = execute.bind(plan, device)
    timings = execute.profile(bound, device, encoder.stream, repeats=PROFILED)
    return summarise(plan, timings, bandwidth, count)
