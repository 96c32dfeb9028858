"""Sessions of models whose layers look back on few keys, and keep the last of them in rings or
pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import Numbers, answer
from urdir.driver.device import Device
from urdir.model.engine.generate import Generation
from urdir.model.engine.realizar import EagerSteps, describe
from urdir.model.engine.realizar.from_sizes import MadeFile
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.layers import Block, LayerConfig
from urdir.model.measure import bench as bench_module
from urdir.model.measure.bench import BenchCase, Rates, bench
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

#: The window of layer 0, and how many slots its ring has in exact arithmetic.
WINDOW, RING = 5, 16
VOCAB, CONTEXT = 60, 256
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Made:
    file: Any
    weights: Weights
    wanted: Any  # logits (tokens, vocab) of a token sequence

    def session(self, device: Device, **settings: Any) -> Session:
        wanted = SessionSettings(CONTEXT, "f32", exact=True, **settings)
        return Session(device, self.weights, wanted)

    @contextmanager
    def open(self, device: Device, **settings: Any) -> Iterator[EagerSteps]:
        with self.session(device, **settings) as session, EagerSteps(session) as eager:
            yield eager


def windowed(config: Config, **fields: Any) -> Config:
    """The same with other fields of the attention of layer 0."""
    first, *others = config.layers
    (before, after), mixer = first.blocks, first.attention
    assert isinstance(mixer, Attention)
    branch = replace(before.branches[0], network=replace(mixer, **fields))
    return replace(config, layers=(LayerConfig((Block((branch,)), after)), *others))


@pytest.fixture(scope="module", params=["window", "chunk"])
def made(request: pytest.FixtureRequest, device: Device, reference_model: Any) -> Iterator[Made]:
    """Layer 0 looks back on five keys, or to the last multiple of five; layer 1 on all."""
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": VOCAB}
    config = windowed(describe(**sizes, context=CONTEXT), **{request.param: WINDOW})
    rng = np.random.default_rng(5)
    shapes = {name: t.shape for name, t in MadeFile(config, "F32", {}).tensors.items()}
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32) / 4 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    file = MadeFile(config, "F32", arrays)
    with Weights.load(file, config, device) as weights:
        yield Made(file, weights, reference_model(file, config).logits)


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, count)]


def check(found: Any, wanted: Any) -> None:
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_len", [0, 16])
def test_a_ring_wraps(made: Made, device: Device, page_len: int) -> None:
    """Prompts and single tokens, over more than twice the ring."""
    sequence = tokens(2 * RING + 9)
    wanted = made.wanted(sequence)
    with made.open(device, page_len=page_len) as eager:
        cache = eager.session.parts.cache
        places = CONTEXT if page_len else RING
        assert (cache.layout(0).places, cache.layout(1).places) == (places, CONTEXT)
        for begin, end in ((0, 7), (7, RING + 5), (RING + 5, RING + 8)):
            eager.feed(sequence[begin:end])
            check(eager.logits()[0], wanted[end - 1])
        for at in range(RING + 8, len(sequence)):
            eager.feed(sequence[at : at + 1])
            check(eager.logits()[0], wanted[at])


def test_what_a_ring_has_lost_is_not_kept(made: Made, device: Device) -> None:
    sequence = tokens(2 * RING)
    wanted = made.wanted(sequence)
    with made.open(device) as eager:
        eager.feed(sequence)
        eager.logits()[0]
        oldest = len(sequence) - RING + WINDOW - 1
        assert (eager.kept(oldest), eager.kept(oldest - 1), eager.kept(0)) == (oldest, 0, 0)
        with pytest.raises(ModelError, match="layers with a window hold later ones only"):
            eager.truncate(oldest - 1)
        assert eager.lengths[0] == len(sequence)
        eager.truncate(oldest)
        eager.feed(sequence[oldest:])
        check(eager.logits()[0], wanted[-1])


def test_a_shared_prefix_that_is_lost_is_processed_again(made: Made, device: Device) -> None:
    """A conversation that goes on from far back begins anew; one from its end does not."""

    def found(prompt: list[int]) -> int:
        """Tokens of the prompt that were there; the answer is as if there were none."""
        request = Request(prompt=tuple(prompt), settings=GREEDY, limit=3)
        generation = Generation(session, Numbers(), request)  # type: ignore[arg-type]
        assert "".join(generation.text()).split() == [str(t) for t in generation.tokens]
        wanted = made.wanted([*prompt, *generation.tokens])[len(prompt) - 1 : -1]
        assert generation.tokens == [int(logits.argmax()) for logits in wanted]
        return generation.statistics.cached_tokens

    first = tokens(2 * RING)
    with made.session(device) as session:
        assert found(first) == 0
        assert found([*first[: 2 * RING - 3], 1, 2]) == 2 * RING - 3
        assert found([*first[:RING], 3, 4, 5]) == 0


@pytest.mark.turns(2)
def test_steps_that_nobody_reads_are_undone(made: Made, device: Device) -> None:
    """Across the border of the ring; the tokens that follow are those of single steps."""
    for length in (RING - 3, 2 * RING - 2):
        with made.session(device) as session:
            with EagerSteps(session) as eager:
                eager.feed(tokens(length))
                expected = [eager.step()[0] for _ in range(6)]
            request = Request(prompt=tuple(tokens(length)), settings=GREEDY)
            left = Generation(session, None, request)
            with closing(left.pieces()) as pieces:
                list(islice(pieces, 2))
            known = left.tokens[:2]
            assert known == expected[:2]
            assert answer(session, [*tokens(length), *known], 4) == expected[2:]


@pytest.mark.turns(3, which=1)
@pytest.mark.parametrize("page_len", [0, 16])
def test_a_fork_has_the_ring_too(made: Made, device: Device, page_len: int) -> None:
    """Both go on, and write where the other's tokens were."""
    sequence = tokens(RING + 9)
    with made.open(device, sequences=2, page_len=page_len) as eager:
        eager.feed(sequence)
        eager.fork(0, 1)
        ends = tokens(2 * RING, seed=1), tokens(2 * RING, seed=2)
        wanted = [made.wanted(sequence + end) for end in ends]
        for at in range(4):
            rows = eager.logits((0, 1))
            for slot in (0, 1):
                check(rows[slot], wanted[slot][len(sequence) - 1 + at])
                eager.feed(ends[slot][at : at + 1], slot)


@pytest.mark.turns(2, which=1)
def test_a_bench_begins_after_what_a_ring_has_lost(
    made: Made, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed is as many tokens as the row's name has, in each run."""
    case = BenchCase((RING + 3,), (3,), (RING + 2,), repeats=1)
    with made.session(device) as session:
        match, found = session.storage.match, []

        def watched(sequence: int, known: Sequence[int], *rest: Any) -> int:
            length = match(sequence, known, *rest)
            if known:
                found.append(length)
            return length

        monkeypatch.setattr(session.storage, "match", watched)
        monkeypatch.setattr(bench_module, "_MOST_UNTIMED", 1)
        rows = list(bench(session, made.file, Rates(1e9, 1e12), case))
        assert [row.test for row in rows] == ["pp19 @ d18", "tg3 @ d18"]
        assert found == [RING + 2] * 2 + [RING + 1] * 2
