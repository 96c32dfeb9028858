"""All layers of a decode step as one persistent kernel, beside the launches that it replaces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, DriverError
from urdir.model.config import Config
from urdir.model.conformance import relative_rms
from urdir.model.engine import Engine, demo_model
from urdir.model.errors import ModelError
from urdir.model.gguf import Gguf
from urdir.model.persistent import named_stalls
from urdir.model.rows import Ending, StepShape
from urdir.model.session import Session
from urdir.model.step import build_plan, check_persistent
from urdir.model.weights import Weights
from urdir.ptxgen.kernels.fused_layers import FusedLayers

PROMPT = [3, 141, 59, 26, 5]
#: Sums in another order, so that other activations are rounded up: two logits, each of which may be
#: off by 3.75e-4 of the exact ones (test_golden).
TOLERANCE = 7.5e-4
#: A key that is rounded to its other neighbour is off by more in a cache of bf16.
BF16_TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def weights(device_name):
    """Those of the demo model, for contexts of more than one length bucket."""
    with Gguf(demo_model()) as gguf, Device.open(device_name) as device:
        config = replace(Config.from_gguf(gguf), context_length=2048)
        with Weights.load(gguf, config, device) as loaded:
            yield loaded


def persistent_launches(session, shape):
    return sum(
        kernel.name == FusedLayers.name for kernel in build_plan(session.parts, shape).kernels()
    )


def logits_of(session, tokens):
    """Logits after each of ``tokens``, one step each."""
    rows = []
    for token in tokens:
        session.feed([token])
        rows.append(session.logits_step())
    return np.array(rows)


@pytest.mark.sanitizer
def test_logits_are_those_of_the_launches(weights):
    with (
        Session(weights, 32, persistent=True) as one,
        Session(weights, 32, persistent=False) as many,
    ):
        check_persistent(one.parts)
        assert relative_rms(logits_of(one, PROMPT), logits_of(many, PROMPT)) < TOLERANCE


@pytest.mark.parametrize("name", ["llama-q4_k_m", "llama-q5_k", "llama-q8_0", "qwen2-q4_k_m"])
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("f16", TOLERANCE), ("bf16", BF16_TOLERANCE)])
def test_types_and_biases(name, kv_dtype, tolerance, data, device_name):
    path = data / "golden" / f"nano-{name}.gguf"
    with (
        Engine.open(str(path), device=device_name, context=32, kv_dtype=kv_dtype) as opened,
        Session(opened.weights, 32, kv_dtype, persistent=True) as one,
        Session(opened.weights, 32, kv_dtype, persistent=False) as many,
    ):
        check_persistent(one.parts)
        assert relative_rms(logits_of(one, PROMPT), logits_of(many, PROMPT)) < tolerance


def test_golden_logits(data, device_name):
    """Within llama.cpp's own rounding, as without it: see test_golden."""
    golden = np.load(data / "golden" / "nano-llama-q4_k_m.npz")
    path = data / "golden" / "nano-llama-q4_k_m.gguf"
    with Engine.open(str(path), device=device_name, persistent=True) as opened:
        check_persistent(opened.session.parts)
        logits = logits_of(opened.session, [int(t) for t in golden["tokens"][:6]])
    assert relative_rms(logits, golden["logits"][:6]) < 2e-3


@pytest.mark.sanitizer
def test_replay_equals_eager_bit_for_bit(weights):
    def launch_eagerly(session):
        bound, stream = session.steps.bound(StepShape(1, 512, Ending.LOGITS)), session._stream
        session.steps.launch = lambda *_: execute.run(bound, weights.device, stream)

    results = []
    for prepare in (lambda _: None, launch_eagerly):
        with Session(weights, 32, persistent=True) as session:
            session.feed(PROMPT)
            prepare(session)
            results.append([session.logits_step()])
            for token in (7, 8):
                session.feed([token])
                results[-1].append(session.logits_step())
    np.testing.assert_array_equal(*results)


def test_a_step_after_a_truncation_is_as_if_there_had_been_none(weights):
    with Session(weights, 32, persistent=True) as session:
        first = logits_of(session, PROMPT)
        session.truncate(2)
        np.testing.assert_array_equal(logits_of(session, PROMPT[2:]), first[2:])


def test_several_steps_a_graph_give_the_same_tokens(weights):
    def tokens(persistent):
        with Session(weights, 64, persistent=persistent) as session:
            session.feed(PROMPT)
            return list(session.stream(Ending.GREEDY, most=20))

    assert tokens(True) == tokens(False)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (StepShape(1, 512, Ending.GREEDY), 1),
        (StepShape(1, 512, Ending.SAMPLE, steps=4), 1),
        (StepShape(2, 512, Ending.GREEDY), 0),
        (StepShape(1, 1024, Ending.GREEDY), 0),
        (StepShape(16, 512, Ending.PROMPT), 0),
    ],
)
def test_which_steps_it_serves(weights, shape, count):
    with Session(weights, 600, sequences=2, persistent=True) as session:
        assert persistent_launches(session, shape) == count


def test_who_looks_at_single_launches_has_them(weights):
    class Nothing:
        def run(self, bound, stream):
            raise AssertionError

    shape = StepShape(1, 512, Ending.GREEDY)
    for options in ({"observer": Nothing()}, {"fused": False}):
        with Session(weights, 32, persistent=True, **options) as session:
            assert persistent_launches(session, shape) == 0


def test_it_is_not_taken_where_nothing_was_measured(weights):
    with Session(weights, 32) as session:
        assert persistent_launches(session, StepShape(1, 512, Ending.GREEDY)) == 0


@pytest.mark.parametrize("name", ["llama-f16", "qwen3-q4_k_m"])
def test_other_models_are_told_so(name, data, device_name):
    path = data / "golden" / f"nano-{name}.gguf"
    with Engine.open(str(path), device=device_name, persistent=True) as opened:
        with pytest.raises(ModelError, match="no persistent kernel serves this model's layers"):
            check_persistent(opened.session.parts)
        assert logits_of(opened.session, PROMPT[:1]).shape == (1, opened.config.vocab_size)


def test_a_wait_in_vain_is_named(weights):
    with Session(weights, 32) as session:
        stall = session.parts.state.stall
        with pytest.raises(CudaError), named_stalls(stall):
            raise CudaError("CUDA_ERROR_LAUNCH_FAILED", 719, "cuStreamSynchronize")
        stall.view(np.uint32, 4)[:] = 4 * 3 + 2, 17, 1234, 1
        message = r"layer 3, ffn_gate_up: CTA 17 waited in vain for activation 1234 .*LAUNCH_FAILED"
        with pytest.raises(DriverError, match=message), named_stalls(stall):
            raise CudaError("CUDA_ERROR_LAUNCH_FAILED", 719, "cuStreamSynchronize")


def test_the_benchmark_measures_either(cli):
    for layers in ("graph", "fused"):
        code, out, _ = cli("bench", "-p", "0", "-n", "2", "-r", "1", "--layers", layers)
        assert code == 0
        assert "tg2" in out


def test_the_benchmark_says_where_there_is_none(cli, data):
    path = data / "golden" / "nano-llama-f16.gguf"
    code, out, err = cli("bench", path, "-p", "0", "-n", "2", "-r", "1", "--layers", "fused")
    assert (code, out) == (1, "")
    assert "no persistent kernel" in err
