"""The engine on a model of every architecture, against llama.cpp's logits (`tests/data/families`).

A GPU takes all of them. The emulator takes a sample and few positions, or all with ``--full``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.partial_sort import WHOLE_POOLS
from tests.model.stepping import Eager, stepping
from urdir.model.engine.engine import Engine
from urdir.model.engine.logits import logprobs_of
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.runner import Observer
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import relative_rms

DATA = Path(__file__).parents[2] / "data" / "families"
#: What the default run has, and why.
SAMPLE = {
    "gemma3-dense": "windows, norms after networks, norms of heads",
    "gpt-oss-moe": "sinks beside windows, experts with biases",
    "starcoder-dense": "LayerNorm, biases, learned positions",
    "bloom-dense": "ALiBi, a norm of the embedding",
    "command-r-dense": "attention and feed-forward side by side",
    "gemma2-dense": "soft caps of scores and logits",
    "gemma4-e": "embeddings of layers, shared caches, two head widths",
    "hunyuan-moe-moe": "norms after RoPE, a shared expert",
    "llama4-moe": "chunks, layers without RoPE, weights before experts",
    "mimo2-moe": "values narrower than keys",
    "phi3-dense": "stacked matrices, long RoPE factors",
    "qwen2moe-moe": "a shared expert with a gate",
    "spark2_5-dense": "gated attention",
}
OTHERS = sorted({p.name.partition(".")[0] for p in DATA.glob("*.xz")} - SAMPLE.keys())
NAMES = [*SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
EXACT_RELATIVE_RMS = 1e-4
#: Positions, token by token, of the emulator's default run.
FEW = 2
#: Tokens fed at once: less than the windows of 20 tokens, and more than an exact ring's 32 slots.
PROMPTS = (17, 40)
#: Positions whose experts are chosen by a margin below `TIE` of the router's logits: rounding
#: decides, and all that follows depends on it. Rounded arithmetic is compared up to there.
TIES = {"dbrx-moe": 43, "gemma4-moe": 39, "hunyuan-moe-moe": 36}
TIE = 1e-3


@dataclass(frozen=True)
class Family:
    """A golden, opened: exact, with an f32 cache. ``logits`` (48, vocabulary) f32; ``native``, the
    error of llama.cpp's kernels; ``positions``, how many to take token by token; ``tie``, the first
    position that rounding decides."""

    engine: Engine
    tokens: list[int]
    logits: np.ndarray
    native: float
    positions: int
    tie: int

    @property
    def is_whole(self) -> bool:
        """Whether all positions are taken; prompts are then whole, and go on, in both modes."""
        return self.positions == len(self.tokens)

    @property
    def logprobs(self) -> np.ndarray:
        """ln p of each token after the first."""
        logits = self.logits[:-1].astype(np.float64)
        own = logits[np.arange(len(logits)), self.tokens[1:]]
        return np.asarray(own - np.logaddexp.reduce(logits, axis=1))

    def by_default(self, observer: Observer | None = None) -> AbstractContextManager[EagerSteps]:
        """Not exact, with an f16 cache."""
        return stepping(
            self.engine.device,
            self.engine.weights,
            SessionSettings(len(self.tokens)),
            observer=observer,
        )

    def token_by_token(self, eager: EagerSteps, positions: int) -> float:
        """The error of the logits after each of the first tokens."""
        eager.truncate(0)
        rows = []
        for token in self.tokens[:positions]:
            eager.feed([token])
            rows.append(eager.logits()[0])
        return relative_rms(np.stack(rows), self.logits[:positions])

    def prompts(self, eager: EagerSteps, at_once: bool, positions: int) -> float:
        """The error of the logits after prompts in the first ``positions``: each a whole one, or
        what goes on with the one before."""
        eager.truncate(0)
        counts = [min(count, positions) for count in PROMPTS]
        rows = []
        for count in counts:
            if at_once:
                eager.truncate(0)
            eager.feed(self.tokens[eager.lengths[0] : count])
            rows.append(eager.logits()[0])
        return relative_rms(np.stack(rows), self.logits[[count - 1 for count in counts]])


@pytest.fixture(scope="module")
def family(
    request: pytest.FixtureRequest,
    device_name: str,
    reference_file: Callable[[str], Path],
    reference_golden: Callable[[str, str], Path],
    supported: Any,
) -> Iterator[Family]:
    name, whole = request.param, request.config.getoption("--full") or device_name == "cuda"
    with np.load(reference_golden("families", name)) as golden:
        tokens = [int(token) for token in golden["tokens"][: WHOLE_POOLS.get(name)]]
        logits, native = golden["logits"][: len(tokens)], float(golden["native"])
    with (
        supported(name),
        Engine.open(
            reference_file(name),
            device=device_name,
            context=len(tokens),
            kv_dtype="f32",
            exact=True,
        ) as engine,
    ):
        positions = len(tokens) if whole else FEW
        tie = TIES.get(name, len(tokens))
        yield Family(engine, tokens, logits, native, positions, tie)


of_each = pytest.mark.references("families", NAMES, argument="family")


@of_each
def test_exact_logits_are_llama_cpp_s(family: Family) -> None:
    whole = len(family.tokens)
    with EagerSteps(family.engine.session) as eager:
        assert family.token_by_token(eager, family.positions) <= EXACT_RELATIVE_RMS
        for at_once in {False, family.is_whole}:
            assert family.prompts(eager, at_once, whole) <= EXACT_RELATIVE_RMS
    if family.is_whole:
        found, wanted = logprobs_of(family.engine.session, family.tokens), family.logprobs
        error = np.sqrt(np.mean((found - wanted) ** 2))
        assert error <= EXACT_RELATIVE_RMS * family.logits.std()


@of_each
@pytest.mark.turns(8, which=1)
@pytest.mark.slow
def test_default_logits_are_at_least_as_near_as_llama_cpp_s(family: Family) -> None:
    """Prompts are multiplied by tensor cores, on activations rounded to f16."""
    allowed = max(2e-3, 1.1 * family.native)
    with family.by_default() as eager:
        assert family.token_by_token(eager, min(family.positions, family.tie)) <= allowed
        for at_once in {True, not family.is_whole}:
            assert family.prompts(eager, at_once, family.tie) <= allowed


@of_each
@pytest.mark.turns(5)
@pytest.mark.slow
def test_a_replayed_graph_gives_the_bits_of_its_launches(family: Family) -> None:
    results = []
    for observer in (None, Eager()):
        with family.by_default(observer) as eager:
            eager.feed(family.tokens[:25])
            rows = [eager.logits()[0]]
            for token in family.tokens[25:27]:
                eager.feed([token])
                rows.append(eager.logits()[0])
            results.append(np.stack(rows))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", TIES)
def test_a_tie_is_one(
    name: str, reference_file: Callable[[str], Path], reference_model: Any
) -> None:
    """What `TIES` leaves out is what the exact scores of the experts do not decide either."""
    margins = []

    class Watching(reference_model):  # type: ignore[misc]
        def _route(self, of: Any, logits: np.ndarray) -> Any:
            best = -np.sort(-logits, axis=1)
            margins.append((best[:, of.used - 1] - best[:, of.used]) / logits.std())
            return super()._route(of, logits)

    with np.load(DATA / f"{name}.npz") as golden, Gguf(reference_file(name)) as file:
        Watching(file, Config.of(file), 64).logits(golden["tokens"])
    assert np.min(margins, axis=0)[TIES[name]] < TIE


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", ["gemma3-dense", "olmoe-moe"])
def test_a_few_tokens_by_recorded_graphs(
    name: str, device_name: str, reference_file: Callable[[str], Path]
) -> None:
    with np.load(DATA / f"{name}.npz") as golden:
        tokens, logits = [int(token) for token in golden["tokens"]], golden["logits"]
    with (
        Engine.open(reference_file(name), device=device_name, context=32) as engine,
        EagerSteps(engine.session) as eager,
    ):
        eager.feed(tokens[:21])
        assert eager.step()[0] == int(np.argmax(logits[20]))
        assert eager.step()[0] < engine.config.vocab_size
