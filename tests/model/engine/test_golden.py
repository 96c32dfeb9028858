"""Whole-model logits against golden ones: llama.cpp on the F32 weights of the same file.

The default run takes a few positions of each file on the emulator; ``--full`` takes all 48.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest

from tests.model.stepping import Eager, logits_of, logits_of_each, stepping
from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.files.gguf import Gguf
from urdir.model.lower.experts import shared_read
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import kl_divergence, relative_rms

Golden = Callable[[str], tuple[Path, list[int], Any]]

# Off by this much: llama.cpp itself on the quantised file (activations rounded to 8 bits), relative
# RMS and KL. Ours may be max(2e-3, 1.1 x) and max(1e-6, 1.2 x) of it in the default mode.
LLAMA_CPP_ERROR = {
    "nano-llama-bf16": (1.91e-03, 9.1e-07),
    "nano-llama-f16": (2.37e-04, 1.4e-08),
    "nano-llama-f32": (0.0, 0.0),
    "nano-llama-q2_k": (1.06e-02, 7.4e-05),
    "nano-llama-q3_k": (9.15e-03, 2.3e-05),
    "nano-llama-q4_0": (6.09e-03, 9.0e-06),
    "nano-llama-q4_1": (5.68e-03, 8.1e-06),
    "nano-llama-q4_k_m": (1.33e-02, 4.4e-05),
    "nano-llama-q5_0": (5.78e-03, 8.5e-06),
    "nano-llama-q5_1": (5.56e-03, 7.9e-06),
    "nano-llama-q5_k": (7.99e-03, 4.3e-05),
    "nano-llama-q6_k": (9.01e-03, 2.1e-05),
    "nano-llama-q8_0": (5.65e-03, 7.9e-06),
    "nano-mixtral-q4_k_m": (1.26e-02, 4.1e-05),
    "nano-qwen2-q4_k_m": (1.85e-02, 2.1e-04),
    "demo-q4_k_m": (3.03e-02, 9.6e-04),
}
#: Files that differ from others in the types of their weights alone.
ONE_ARCHITECTURE = [
    name for name in LLAMA_CPP_ERROR if "llama" in name and name[11:] not in ("f32", "q4_k_m")
]
EXACT_RELATIVE_RMS = 1e-4
FEW = 4


def _logits(path: Path, device: str, kv_dtype: str, tokens: list[int], exact: bool) -> np.ndarray:
    with Engine.open(
        path, device=device, context=len(tokens), kv_dtype=kv_dtype, exact=exact
    ) as engine:
        return logits_of_each(engine.session, tokens)


def _positions(device: str, total: int, full: bool) -> int:
    return total if full or device == "cuda" else FEW


@pytest.mark.turns(6)
@pytest.mark.references("golden", LLAMA_CPP_ERROR)
def test_exact_mode_matches_golden(
    name: str, device_name: str, pytestconfig: pytest.Config, golden: Golden, supported: Any
) -> None:
    path, tokens, wanted = golden(name)
    n = _positions(device_name, len(tokens), pytestconfig.getoption("--full"))
    with supported(name):
        logits = _logits(path, device_name, "f32", tokens[:n], exact=True)
    error = relative_rms(logits, wanted[:n])
    print(f"{name} on {device_name}, exact, {n} positions: relative RMS {error:.2e}")
    assert error <= EXACT_RELATIVE_RMS


@pytest.mark.turns(6, which=1)
@pytest.mark.references(
    "golden", [*reversed(LLAMA_CPP_ERROR)]
)  # of which the exact test has others
def test_default_mode_stays_within_the_allowance(
    name: str, device_name: str, pytestconfig: pytest.Config, golden: Golden, supported: Any
) -> None:
    if name not in LLAMA_CPP_ERROR:
        pytest.skip(f"{name}: llama.cpp's own error is not known")
    path, tokens, wanted = golden(name)
    n = _positions(device_name, len(tokens), pytestconfig.getoption("--full"))
    logits = _logits(path, device_name, "f16", tokens[:n], exact=False)
    error, kl = relative_rms(logits, wanted[:n]), kl_divergence(logits, wanted[:n])
    their_error, their_kl = LLAMA_CPP_ERROR[name]
    print(
        f"{name} on {device_name}, default, {n} positions: relative RMS {error:.2e}"
        f" (llama.cpp {their_error:.2e}), KL {kl:.1e} (llama.cpp {their_kl:.1e})"
    )
    assert error <= max(2e-3, 1.1 * their_error)
    assert kl <= max(1e-6, 1.2 * their_kl)


@pytest.mark.turns(3)
@pytest.mark.references(
    "golden",
    [  # one file of each architecture, or all with --full: the others have the same graphs
        pytest.param(name, marks=[pytest.mark.full] * (name in ONE_ARCHITECTURE))
        for name in LLAMA_CPP_ERROR
    ],
)
def test_replay_equals_eager_bit_for_bit(
    name: str, device_name: str, pytestconfig: pytest.Config, golden: Golden, supported: Any
) -> None:
    path, tokens, _ = golden(name)
    n = _positions(device_name, len(tokens), pytestconfig.getoption("--full"))
    results = []
    with supported(name), Engine.open(path, device=device_name, context=len(tokens)) as engine:
        for observer in (None, Eager()):
            with stepping(
                engine.device, engine.weights, SessionSettings(len(tokens)), observer=observer
            ) as eager:
                eager.feed(tokens[: n - 2])
                rows = [eager.logits()[0]]
                for token in tokens[n - 2 : n]:
                    eager.feed([token])
                    rows.append(eager.logits()[0])
                results.append(np.stack(rows))
    np.testing.assert_array_equal(results[0], results[1])


QUANTISED = [name for name in LLAMA_CPP_ERROR if "-q" in name]


@pytest.mark.turns(6, which=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_batched_steps_stay_within_the_allowance(
    name: str, device_name: str, golden: Golden
) -> None:
    """Three sequences in one step, each a token ahead of the one before it."""
    path, tokens, wanted = golden(name)
    steps, context = (20, 32) if device_name == "cuda" else (2, 8)
    rows, expected = [], []
    with (
        Engine.open(path, device=device_name, context=context, sequences=3) as engine,
        EagerSteps(engine.session) as eager,
    ):
        for sequence in range(3):
            for token in tokens[:sequence]:
                eager.feed([token], sequence)
                eager.logits((sequence,))
        for step in range(steps):
            for sequence in range(3):
                eager.feed([tokens[step + sequence]], sequence)
            rows.append(eager.logits((0, 1, 2)))
            expected.append(wanted[step : step + 3])
    logits, wanted = np.concatenate(rows), np.concatenate(expected)
    error, kl = relative_rms(logits, wanted), kl_divergence(logits, wanted)
    their_error, their_kl = LLAMA_CPP_ERROR[name]
    print(f"{name} on {device_name}, batches of 3: relative RMS {error:.2e}, KL {kl:.1e}")
    assert error <= max(2e-3, 1.1 * their_error)
    assert kl <= max(1e-6, 1.2 * their_kl)


@pytest.mark.turns(2, which=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("nano-mixtral-q4_k_m", 8), ("nano-mixtral-q4_k_m", 2)]
)
def test_rows_that_read_experts_together(
    name: str, count: int, device_name: str, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """A step of several sequences, each a token ahead of the one before it: as each of them alone,
    within the allowance, and replayed as launch by launch."""
    monkeypatch.setattr(shared_read, "pays_together", lambda *_: True)
    path, tokens, wanted = golden(name)
    results, alone = [], []
    with Engine.open(path, device=device_name, context=16) as engine:
        for observer in (None, Eager()):
            with stepping(
                engine.device,
                engine.weights,
                SessionSettings(16, sequences=count),
                observer=observer,
            ) as eager:
                for sequence in range(count):
                    eager.feed(tokens[: sequence + 1], sequence)
                results.append(eager.logits(range(count)))
                shape = eager.session.shapes.decode(count, count, Output.LOGITS)
                bound = eager.session.steps.bound(shape)
                kernels = [op.kernel.name for op in bound.plan if isinstance(op, Launch)]
                assert "experts_gemm_small" in kernels
        for sequence in range(count):
            alone.append(logits_of(engine.session, tokens[: sequence + 1]))
    np.testing.assert_array_equal(results[0], results[1])
    error = relative_rms(results[0], wanted[:count])
    difference = relative_rms(results[0], np.stack(alone))
    print(f"{name} on {device_name}, {count} together: {error:.2e}, alone: {difference:.2e}")
    assert error <= max(2e-3, 1.1 * LLAMA_CPP_ERROR[name][0])
    assert difference <= 5e-4


@pytest.mark.turns(4, which=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "demo-q4_k_m",
        "nano-llama-f32",
        "nano-qwen2-q4_k_m",
        "nano-mixtral-q4_k_m",
    ],
)
def test_prompt_steps_stay_within_the_allowance(
    name: str, device_name: str, golden: Golden
) -> None:
    """Logits after a whole prompt at once, whose products round activations to f16."""
    path, tokens, wanted = golden(name)
    with Engine.open(path, device=device_name, context=len(tokens)) as engine:
        rows = [logits_of(engine.session, tokens[:n]) for n in (17, 40)]
    error = relative_rms(np.stack(rows), wanted[[16, 39]])
    print(f"{name} on {device_name}, prompts of 17 and 40: relative RMS {error:.2e}")
    assert error <= max(2e-3, 1.1 * LLAMA_CPP_ERROR[name][0])


@pytest.mark.turns(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["nano-llama-q4_k_m", "nano-llama-q8_0"])
def test_error_of_the_cache_types(name: str, device_name: str, golden: Golden) -> None:
    """What storing keys and values in fewer bits costs, against an f32 cache."""
    path, tokens, _ = golden(name)
    n = 48 if device_name == "cuda" else 8
    exact = _logits(path, device_name, "f32", tokens[:n], exact=True)
    for kv_dtype, allowed in (("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 2e-2), ("fp8", 1e-1)):
        logits = _logits(path, device_name, kv_dtype, tokens[:n], exact=True)
        error = relative_rms(logits, exact)
        print(f"{name} on {device_name}, {kv_dtype} cache: relative RMS {error:.2e}")
        assert 0 < error <= allowed


@pytest.mark.slow
def test_the_bias_of_the_output_is_added_once(
    tmp_path: Path, device_name: str, golden: Golden
) -> None:
    path, tokens, wanted = golden("nano-llama-f32")
    biased = tmp_path / "biased.gguf"
    bias = np.random.default_rng(5).standard_normal(wanted.shape[1]).astype(np.float32)
    _copy_with_tensor(path, biased, "output.bias", bias)
    with (
        Engine.open(biased, device=device_name, context=8, kv_dtype="f32", exact=True) as engine,
        EagerSteps(engine.session) as eager,
    ):
        eager.feed(tokens[:3])
        logits = eager.logits()[0]
        eager.truncate(0)
        eager.feed(tokens[:3])
        assert eager.step()[0] == int(np.argmax(wanted[2] + bias))
    assert relative_rms(logits, wanted[2] + bias) <= EXACT_RELATIVE_RMS


def _copy_with_tensor(source: Path, target: Path, name: str, values: np.ndarray) -> None:
    """Write an F32 model of the llama architecture again, with one more tensor."""
    with Gguf(source) as gguf:
        writer = gguf_package.GGUFWriter(str(target), gguf.architecture)
        for key, value in gguf.metadata.items():
            if isinstance(value, bool) or not key.startswith("llama."):
                continue
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(key, value)
        for tensor in gguf.tensors.values():
            writer.add_tensor(tensor.name, tensor.data[:].view(np.float32).reshape(tensor.shape))
        writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
