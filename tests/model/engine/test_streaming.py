"""Weights in host memory: results are those of weights on the device, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import answer, logits_of, logits_of_each, stepping
from urdir.driver import bindings
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, OutOfMemoryError
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError, SettingsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.placement import Placement, streamable, with_streaming
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights, weight_sizes

DATA = Path(__file__).parents[2] / "data"
#: Mixtures of the default run, and why.
SAMPLE = {
    "gpt-oss-moe": "biases",
    "qwen2moe-moe": "a shared expert with a gate",
    "llama4-moe": "weights before experts",
}
MIXTURES = sorted(
    path.name.partition(".")[0]
    for path in (DATA / "families").glob("*moe*.gguf.xz")
    if path.name.partition(".")[0] not in SAMPLE
)
NAMES = [*SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in MIXTURES)]
EXPERTS = Placement(host_experts=99)


@contextmanager
def opened(device: Device, path: Path, placement: Placement | None) -> Iterator[Weights]:
    """The weights of a file, placed so."""
    with Gguf(path) as gguf:
        config = Config.of(gguf)
        if placement is not None:
            names = placement.on_host(config)
            assert names
            config = with_streaming(config, names, placement.expert_slots or 0)
        with Weights.load(gguf, config, device) as weights:
            yield weights


def results(device: Device, path: Path, placement: Placement | None) -> list[Any]:
    """Logits of decode steps and of a prompt, a greedy answer, tokens of three sequences that are
    in one step; and how many experts were copied."""
    settings = SessionSettings(context=64, sequences=3, page_len=16)
    with opened(device, path, placement) as weights:
        vocab = weights.config.vocab_size
        tokens = [(number * 7 + 3) % vocab for number in range(24)]
        with Session(device, weights, settings) as session:
            found = [logits_of_each(session, tokens[:4]), logits_of(session, tokens)]
            found.append(answer(session, tokens[:9], 7))
        with stepping(device, weights, settings) as eager:
            for sequence in range(3):
                eager.feed(tokens[sequence : sequence + 5], sequence)
            found.append([eager.step() for _ in range(3)])
        caches = weights.expert_caches.values()
        found.append([cache.statistics() for cache in caches])
    return found


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """That results are equal, but for what was copied."""
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_mixtures_with_caches_of_one_two_and_all_experts(
    name: str, device: Device, reference_file: Callable[[str], Path]
) -> None:
    path = reference_file(name)
    expected = results(device, path, None)
    copies = {}
    for slots in (1, 2, 99):
        found = results(device, path, replace(EXPERTS, expert_slots=slots))
        same(found, expected)
        copies[slots] = found[-1]
    experts = [0]
    with Gguf(path) as gguf:
        mixtures = [of for layer in Config.of(gguf).layers for of in layer.mixtures]
    experts = [of.router.experts for of in mixtures]
    assert len(copies[99]) == len(experts)
    # with room for all, each is copied once at most
    assert all(0 < done <= most for (_, done), most in zip(copies[99], experts, strict=True))
    if mixtures[0].router.used == 2:
        assert all(done == 0 for _, done in copies[1])  # too few for a row: all are streamed
        assert sum(done for _, done in copies[2]) >= sum(done for _, done in copies[99])
