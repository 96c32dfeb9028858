"""Weights in host memory: steps whose edges are missing, long runs, failing reads."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.driver.planted import graph_without
from tests.model.engine.test_streaming import ALL_CACHED, cached, opened
from tests.model.stepping import stepping
from urdir.driver import bindings
from urdir.driver.dependencies import Hazard
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, DriverError, LaunchError
from urdir.driver.operation import Launch
from urdir.driver.streamed import is_transfer
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.session import Session
from urdir.model.memory.session_settings import SessionSettings

#: Seconds of a run where no more are asked for.
SHORT = 2


@pytest.mark.parametrize(
    ("first", "hazard"),
    [
        (r"transfer blk\.1\.attn_q", Hazard.READ_AFTER_WRITE),
        (r"blk\.1\..*\.gather", Hazard.READ_AFTER_WRITE),
        (r"blk\.0\..*\.place", Hazard.READ_AFTER_WRITE),
    ],
    ids=["layer", "experts", "list of experts"],
)
def test_the_emulator_finds_an_early_read(
    first: str, hazard: Hazard, reference_file: Callable[[str], Path]
) -> None:
    """Of a real step without one of its edges: it is refused; if it is not, the emulator finds two
    operations on the same bytes that are not ordered. Caches have less slots than a row uses, so
    that there are launches that place experts and copy them."""
    placement = replace(ALL_CACHED, expert_slots=1)
    with (
        Device.open("emulator", api=bindings.emulated()) as device,
        opened(device, reference_file("gpt-oss-moe"), placement) as weights,
        Session(device, weights, SessionSettings(context=32)) as session,
    ):
        plan = session.steps.bound(StepShape(1, 32, Output.GREEDY)).plan
        labels = [operation.label for operation in plan]
        number = next(n for n, label in enumerate(labels) if re.match(first, label))
        edge = next(of for of in plan.edges() if of.before == number and of.hazard is hazard)
        graph = graph_without(plan, device, (edge.before, edge.after))
        with pytest.raises(LaunchError, match="no path leads"):
            graph.instantiate()
        with graph.instantiate(needed=()) as recorded, device.create_stream() as stream:
            recorded.launch(stream)
            with pytest.raises(CudaError, match="not ordered"):
                stream.synchronize()


def random_ops(rng: random.Random, sessions: Sequence[EagerSteps], vocab: int) -> list[Any]:
    """What comes of the same random work on two sessions: a prompt, steps of some sequences, or a
    cut."""
    eager = sessions[0]
    sequence, lengths = rng.randrange(3), [len(tokens) for tokens in eager.tokens]
    kind = rng.choice(["prompt", "steps", "steps", "cut"])
    if lengths[sequence] > 50 or kind == "cut":
        for each in sessions:
            each.truncate(0, sequence)
        return []
    if kind == "prompt" or not lengths[sequence]:
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 9))]
        for each in sessions:
            each.feed(prompt, sequence)
        found = [each.logits((sequence,))[0] for each in sessions]
        for each in sessions:
            each.feed(prompt[:1], sequence)
        return found
    some = tuple(n for n, length in enumerate(lengths) if 0 < length <= 50)
    some = rng.choice([some, (sequence,)])  # of one row: its experts have slots
    return [[each.step(some) for _ in range(2)] for each in sessions]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("in_files", [False, True], ids=["host memory", "files"])
def test_random_requests_route_differently_for_long(
    in_files: bool,
    device: Device,
    tmp_path: Path,
    reference_file: Callable[[str], Path],
    pytestconfig: pytest.Config,
) -> None:
    """Results of two sessions, of which one has all experts on the device, stay the same while the
    caches of the other take in and lose experts."""
    is_long = not device.is_emulated and pytestconfig.getoption("--full")
    end = time.monotonic() + (pytestconfig.getoption("--soak") if is_long else SHORT)
    path, settings = reference_file("qwen3moe-moe"), SessionSettings(context=64, sequences=3)
    rng, results = random.Random(7), 0
    with ExitStack() as owners:
        both = []
        for placement in (None, ALL_CACHED):
            folder = tmp_path if in_files and placement else None
            weights = owners.enter_context(opened(device, path, placement, folder))
            both.append(owners.enter_context(stepping(device, weights, settings)))
        caches = weights.expert_caches.values()
        while time.monotonic() < end or results < 15:
            found = random_ops(rng, both, weights.config.vocab_size)
            if found:
                results += 1
                np.testing.assert_array_equal(found[1], found[0])
        assert sum(cache.statistics()[1] for cache in caches) > 5
        assert any({*cached(cache)} != {0, 1} for cache in caches)


@pytest.mark.parametrize("function", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuMemcpyDtoH"])
def test_a_call_that_fails_while_files_are_read(
    function: str, tmp_path: Path, reference_file: Callable[[str], Path]
) -> None:
    """It ends the step, and all later ones: experts that were placed have not come to their slots.
    Nothing is left behind."""
    api, path = bindings.emulated(), reference_file("gpt-oss-moe")
    with (
        Device.open("emulator", api=api) as device,
        opened(device, path, ALL_CACHED, tmp_path) as weights,
        stepping(device, weights, SessionSettings(context=32)) as eager,
    ):
        eager.feed([3, 5, 7])
        eager.step()
        for words in (function, "could not be read before"):
            if words == function:
                api.inject(function)
            with pytest.raises(DriverError, match=words):
                eager.step()
    assert api.live() == {}


def test_what_reads_a_slot_starts_after_its_transfer(
    device: Device, reference_file: Callable[[str], Path]
) -> None:
    """Kernels read weights before they wait for others: programmatic edges would be too early for
    those that a kernel gathers into a slot."""
    with (
        opened(device, reference_file("gpt-oss-moe"), ALL_CACHED) as weights,
        Session(device, weights, SessionSettings(context=32)) as session,
    ):
        graph = session.steps.graph(StepShape(8, 32, Output.GREEDY, prompt=8))
        operations = [node.operation for node in graph.nodes]
        transfers = {number for number, of in enumerate(operations) if is_transfer(of)}
        assert any(isinstance(operations[number], Launch) for number in transfers)
        early = [edge for edge in graph.edges if edge.programmatic]
        assert early
        assert not any({edge.before, edge.after} & transfers for edge in early)
