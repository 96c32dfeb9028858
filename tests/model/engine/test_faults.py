"""Injected faults: each ends in one typed error, and nothing stays allocated after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.stepping import stepping
from urdir.driver import bindings
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, OutOfMemoryError
from urdir.model.engine.budget import MemoryPlan, SessionBudget
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.lower.paper import paper_weights
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights


@pytest.fixture
def gguf(data: Path) -> Iterator[Gguf]:
    with Gguf(data / "golden" / "nano-llama-q8_0.gguf") as opened:
        yield opened


@pytest.fixture
def api() -> Any:
    return bindings.emulated(total_memory=256 << 20)


@pytest.fixture
def faulty(api: Any) -> Iterator[Device]:
    """An emulated device of 256 MB whose driver can be told to fail."""
    with Device.open("emulator", api=api) as opened:
        yield opened


@pytest.mark.parametrize("nth", [1, 2])
def test_an_allocation_that_fails_while_loading_frees_the_rest(
    gguf: Gguf, faulty: Device, api: Any, nth: int
) -> None:
    free, _ = faulty.memory_info()
    api.inject("allocation", nth=nth)
    with pytest.raises(OutOfMemoryError, match="needs"):
        Weights.load(gguf, Config.of(gguf), faulty)
    assert faulty.memory_info()[0] == free
    with Weights.load(gguf, Config.of(gguf), faulty) as weights:
        assert weights.nbytes > 900_000  # the next attempt works


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_allocation_that_fails_in_a_session_frees_the_rest(
    gguf: Gguf, faulty: Device, api: Any, nth: int
) -> None:
    with Weights.load(gguf, Config.of(gguf), faulty) as weights:
        free, _ = faulty.memory_info()
        api.inject("allocation", nth=nth)
        with pytest.raises(OutOfMemoryError):
            Session(faulty, weights, SessionSettings(context=32))
        assert faulty.memory_info()[0] == free


def test_a_module_that_does_not_load_leaves_the_sequence_as_it_was(
    gguf: Gguf, faulty: Device, api: Any
) -> None:
    with (
        Weights.load(gguf, Config.of(gguf), faulty) as weights,
        stepping(faulty, weights, SessionSettings(context=32)) as eager,
    ):
        eager.feed([1])
        api.inject("module_load")
        with pytest.raises(CudaError):
            eager.step()
        assert eager.lengths[0] == 0
        assert eager.step()[0] >= 0
        assert eager.lengths[0] == 1


def test_a_poisoned_context_is_named_and_everything_can_be_closed(
    gguf: Gguf, faulty: Device, api: Any
) -> None:
    with (
        Weights.load(gguf, Config.of(gguf), faulty) as weights,
        stepping(faulty, weights, SessionSettings(context=32)) as eager,
    ):
        eager.feed([1])
        api.inject("launch", nth=3, code="CUDA_ERROR_ILLEGAL_ADDRESS")
        with pytest.raises(CudaError, match="poisoned"):
            eager.step()
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            eager.truncate(0)


def test_a_context_larger_than_memory_tells_needed_and_available_bytes(
    gguf: Gguf, faulty: Device
) -> None:
    config = Config.of(gguf)
    weights = paper_weights(gguf, config, faulty)
    budget = SessionBudget.of(weights, SessionSettings(1 << 20))
    with pytest.raises(ModelError, match=r"[\d,]+ bytes needed .*, [\d,]+ available"):
        MemoryPlan.of(gguf, config, budget).check(faulty)
    budget = SessionBudget.of(weights, SessionSettings(256))
    MemoryPlan.of(gguf, config, budget).check(faulty)
