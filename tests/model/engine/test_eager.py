"""Sequences: recorded steps against eager ones, prompts against single tokens, batches against
single sequences, and the edges of the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.model.stepping import Eager, answer, set_sampling, stepping
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.stream import Stream
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.sampling import sample
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.attention.kv_types import KvDtype

PROMPT = [3, 141, 59, 26, 5]
#: Prompt steps round activations and weights to f16 for the tensor cores: 5e-4 of each product of
#: Q4_K weights, whose minimums are rounded too. Single tokens round neither.
PROMPT_TOLERANCE = 4e-3


def contiguous_and_pages(page_len: int) -> pytest.MarkDecorator:
    """A test of pages, and with ``--full`` of a contiguous cache, which most tests have."""
    contiguous = pytest.param(0, marks=pytest.mark.full)
    return pytest.mark.parametrize("page_len", [page_len, contiguous])


@pytest.fixture(scope="module")
def weights(device: Device) -> Iterator[Weights]:
    path = Path(__file__).parent.parent.parent / "data" / "golden" / "nano-llama-q4_k_m.gguf"
    with Gguf(path) as gguf:
        config = replace(Config.of(gguf), context_length=2048)
        with Weights.load(gguf, config, device) as loaded:
            yield loaded


@pytest.fixture
def eager(device: Device, weights: Weights) -> Iterator[EagerSteps]:
    with stepping(device, weights, SessionSettings(context=24)) as opened:
        yield opened


def feed_singly(eager: EagerSteps, tokens: list[int], sequence: int = 0) -> None:
    """Process tokens one step each, and leave the last one pending."""
    for token in tokens[:-1]:
        eager.feed([token], sequence)
        eager.logits([sequence])
    eager.feed(tokens[-1:], sequence)


@pytest.mark.slow
@pytest.mark.sanitizer
def test_device_argmax_equals_host_argmax(eager: EagerSteps) -> None:
    eager.feed(PROMPT)
    on_device = [eager.step()[0] for _ in range(4)]
    eager.truncate(0)
    eager.feed(PROMPT)
    on_host = []
    for _ in range(4):
        on_host.append(int(np.argmax(eager.logits()[0])))
        eager.feed(on_host[-1:])
    assert on_device == on_host


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "exact"),
    [("f16", False), ("f32", True), ("f32", False), ("q8_0", True), ("fp8", False)],
)
def test_replay_equals_eager_bit_for_bit(
    device: Device, weights: Weights, kv_dtype: KvDtype, exact: bool
) -> None:
    results = []
    for observer in (None, Eager()):
        with stepping(
            device,
            weights,
            SessionSettings(24, kv_dtype, exact=exact, sequences=2),
            observer=observer,
        ) as eager:
            eager.feed(PROMPT)
            rows = [eager.logits()[0]]
            for token in (7, 300, 12):
                eager.feed([token])
                rows.append(eager.logits()[0])
            eager.truncate(2)
            eager.feed([*PROMPT[2:], 9, 8])
            rows.append(eager.logits()[0])
            eager.fork(0, 1)
            eager.feed([10], 0)
            eager.feed([11], 1)
            rows.extend(eager.logits((0, 1)))
            results.append(np.stack(rows))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.slow
def test_what_a_step_left_in_the_workspace_does_not_matter(eager: EagerSteps) -> None:
    """As it must be after a step that failed: no counter, no flag lives from step to step."""
    results = []
    for byte in (None, 0x00, 0xFF, 0x7F):
        eager.truncate(0)
        eager.feed(PROMPT)
        tokens = []
        for _ in range(3):
            if byte is not None:
                work = eager.session.parts.work
                assert work.shared is not None
                for part in (work.shared, *work.kept.values()):
                    part.fill(byte)
            tokens.append(eager.step()[0])
        results.append(tokens)
    assert results[1:] == results[:1] * 3


def test_a_graph_has_a_node_for_every_launch(eager: EagerSteps) -> None:
    keys = eager.session.shapes.keys(1)
    shapes = [StepShape(8, keys, output, prompt=8) for output in Output]
    for shape in (*shapes, *(StepShape(1, keys, output) for output in list(Output)[1:])):
        assert eager.session.steps.graph(shape).node_count == len(eager.session.steps.bound(shape))


@pytest.mark.turns(5)
@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "q8_0", "f32"])
def test_a_prompt_step_equals_single_tokens(
    device: Device, weights: Weights, kv_dtype: KvDtype, exact: bool
) -> None:
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 320, 21)]
    with stepping(device, weights, SessionSettings(24, kv_dtype, exact=exact)) as eager:
        eager.feed(tokens)
        at_once = eager.logits()[0]
        eager.truncate(0)
        feed_singly(eager, tokens)
        singly = eager.logits()[0]
    tolerance = 1e-5 if exact and kv_dtype == "f32" else PROMPT_TOLERANCE
    assert relative_rms(at_once, singly) < tolerance


def test_truncating_and_feeding_again_changes_nothing(eager: EagerSteps) -> None:
    feed_singly(eager, PROMPT)
    first = eager.logits()[0]
    eager.feed([9, 9, 9])
    eager.logits()[0]
    eager.truncate(3)
    feed_singly(eager, PROMPT[3:])
    np.testing.assert_array_equal(eager.logits()[0], first)


def test_device_positions_follow_the_host(eager: EagerSteps) -> None:
    eager.feed(PROMPT)
    for _ in range(5):
        eager.step()[0]
        assert eager.session.parts.state.positions() == {0: eager.lengths[0]}


# ---- batches ----


@pytest.mark.slow
@contiguous_and_pages(16)
def test_batched_rows_equal_single_sequences(
    device: Device, weights: Weights, page_len: int
) -> None:
    """Three sequences of different lengths in one step: the tokens of one at a time."""
    rng = np.random.default_rng(2)
    prompts = [[int(t) for t in rng.integers(0, 320, n)] for n in (3, 11, 6)]
    with stepping(device, weights, SessionSettings(24, sequences=3, page_len=page_len)) as eager:
        for sequence, prompt in enumerate(prompts):
            eager.feed(prompt, sequence)
        together = [eager.step((0, 1, 2)) for _ in range(2)]
        for sequence, prompt in enumerate(prompts):
            eager.truncate(0, sequence)
            eager.feed(prompt, sequence)
            alone = [eager.step((sequence,))[0] for _ in range(2)]
            assert alone == [tokens[sequence] for tokens in together]


@pytest.mark.slow
@contiguous_and_pages(16)
def test_a_fork_goes_its_own_way(device: Device, weights: Weights, page_len: int) -> None:
    with stepping(device, weights, SessionSettings(48, sequences=2, page_len=page_len)) as eager:
        feed_singly(eager, PROMPT * 4)
        eager.fork(0, 1)
        first = eager.step((0, 1))
        assert first[0] == first[1]
        eager.truncate(len(PROMPT) * 4 - 1, 1)
        feed_singly(eager, [PROMPT[-1], 77, 78], 1)
        both = eager.logits((0, 1))
        eager.truncate(0, 0)
        feed_singly(eager, [*PROMPT * 4, 77, 78])
        eager.truncate(0, 1)
        eager.fork(0, 1)
        for logits in eager.logits((0, 1)):
            np.testing.assert_array_equal(logits, both[1])


@pytest.mark.slow
def test_pages_are_shared_until_written_and_given_back(device: Device, weights: Weights) -> None:
    with stepping(device, weights, SessionSettings(64, sequences=2, page_len=16, pages=4)) as eager:
        cache = eager.session.parts.cache
        eager.feed([1] * 34)  # all but the last need three pages
        assert cache.free_tokens == 16
        eager.fork(0, 1)
        assert cache.free_tokens == 16
        eager.step((1,))  # writes position 33: the shared third page is copied
        assert cache.free_tokens == 0
        with pytest.raises(ContextFullError, match="pages of 16"):
            eager.feed([1] * 20, 0)
        assert eager.lengths == [33, 34]
        eager.truncate(0, 1)
        assert cache.free_tokens == 16
        eager.feed([1] * 14, 0)
        eager.step()[0]
        assert eager.lengths[0] == 48


@pytest.mark.slow
def test_a_batch_on_tensor_cores_equals_single_sequences_within_tolerance(
    device: Device,
    weights: Weights,
) -> None:
    rng = np.random.default_rng(3)
    count = 11  # rows of the step: 16, five of them idle
    with stepping(device, weights, SessionSettings(24, sequences=count)) as eager:
        for sequence in range(count):
            eager.feed([int(t) for t in rng.integers(0, 320, 2 + sequence)], sequence)
        together = eager.logits(range(count))
        for sequence in (0, 7, 10):
            eager.truncate(eager.lengths[sequence] - 1, sequence)
        rng = np.random.default_rng(3)
        prompts = [[int(t) for t in rng.integers(0, 320, 2 + s)] for s in range(count)]
        for sequence in (0, 7, 10):
            eager.feed(prompts[sequence][-1:], sequence)
            alone = eager.logits((sequence,))
            assert relative_rms(together[sequence], alone[0]) < PROMPT_TOLERANCE


# ---- length buckets ----


@pytest.mark.slow
@contiguous_and_pages(64)
def test_crossing_a_bucket_is_invisible(device: Device, weights: Weights, page_len: int) -> None:
    """From incremental attention to flash decoding at 256 keys, replayed and eager, and back."""

    tokens = [int(t) for t in np.random.default_rng(4).integers(0, 320, 253)]
    results = []
    for observer in (None, Eager()):
        with stepping(
            device, weights, SessionSettings(1000, page_len=page_len), observer=observer
        ) as eager:
            eager.feed(tokens)
            rows = [eager.logits()[0]]
            for token in range(6):
                eager.feed([token])
                rows.append(eager.logits()[0])
            assert eager.lengths[0] == 259
            assert eager.session.parts.state.positions() == {0: 259}
            eager.truncate(254)
            eager.feed([1])
            rows.append(eager.logits()[0])
            results.append(np.stack(rows))
            assert eager.session.shapes.keys(256) < eager.session.shapes.keys(257)
    np.testing.assert_array_equal(results[0], results[1])
    # below the border again, after truncation from above it: as when it was first there
    np.testing.assert_array_equal(results[0][-1], results[0][2])


# ---- answers, whose steps run ahead ----


@pytest.mark.slow
def test_running_ahead_changes_nothing(device: Device, weights: Weights) -> None:
    with Session(device, weights, SessionSettings(context=16)) as session:
        with EagerSteps(session) as eager:
            eager.feed(PROMPT)
            singly = [eager.step()[0] for _ in range(16 - len(PROMPT) + 1)]
        assert answer(session, PROMPT) == singly
        with EagerSteps(session) as eager:
            eager.feed(PROMPT)
            assert [eager.step()[0] for _ in range(4)] == singly[:4]


@pytest.mark.slow
def test_sampling_on_the_device_equals_numpy(eager: EagerSteps) -> None:
    settings = SamplingSettings(temperature=1.3, top_k=50, repeat_penalty=1.2, seed=11)
    set_sampling(eager, settings)
    eager.feed(PROMPT)
    on_device = [eager.step(output=Output.SAMPLE)[0] for _ in range(6)]
    eager.truncate(0)
    eager.feed(PROMPT)
    sequence = list(PROMPT)
    for _ in range(6):
        token = sample(eager.logits()[0], settings, len(sequence), sequence)
        sequence.append(token)
        eager.feed([token])
    assert on_device == sequence[len(PROMPT) :]


# ---- edges ----


def test_a_full_context_is_refused_and_leaves_the_sequence_as_it_was(eager: EagerSteps) -> None:
    with pytest.raises(ContextFullError, match="by 1"):
        eager.feed([1] * 25)
    assert eager.lengths[0] == 0
    eager.feed([1] * 24)
    eager.step()[0]
    assert eager.lengths == [24]
    with pytest.raises(ContextFullError):
        eager.step()[0]
    eager.truncate(20)
    eager.feed([5])
    eager.step()[0]
    assert eager.lengths[0] == 21


def test_what_cannot_be_is_refused(eager: EagerSteps) -> None:
    with pytest.raises(ModelError, match="320"):
        eager.feed([1, 320])
    with pytest.raises(ModelError, match="pending"):
        eager.step()[0]
    with pytest.raises(ModelError, match="each once"):
        eager.step((0, 0))


def test_numpy_references_of_the_whole_plan_agree(device: Device, weights: Weights) -> None:
    results = []

    class References:
        """Evaluates every step with the kernels' numpy references."""

        def run(self, bound: execute.BoundPlan, stream: Stream) -> None:
            execute.evaluate(bound)

    for observer in (None, References()):
        with stepping(device, weights, SessionSettings(24), observer=observer) as eager:
            eager.feed(PROMPT)
            results.append(eager.logits()[0])
    assert relative_rms(results[1], results[0]) < PROMPT_TOLERANCE
