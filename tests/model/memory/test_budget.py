"""The memory plan: what is allocated is what was computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from urdir.driver.device import Device
from urdir.model.engine.batch import Batch, Output, Segment, ShapeBuckets
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.families.description import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.budget import (
    RESERVE_BYTES,
    MemoryPlan,
    SessionBudget,
    check_context,
    most_sequences,
)
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.attention.kv_layout import KvDtype

#: An arena rounds each of its parts up to this.
ALIGNMENT = 256


@pytest.mark.parametrize(
    ("kv_dtype", "exact", "sequences", "page_len"),
    [("f16", False, 1, 0), ("q8_0", True, 3, 0), ("f32", False, 2, 16)],
)
def test_a_session_takes_what_its_budget_says(
    data: Path, emulator: Device, kv_dtype: KvDtype, exact: bool, sequences: int, page_len: int
) -> None:
    with Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf:
        config = Config.from_gguf(gguf)
        budget = SessionBudget.of(
            config,
            24,
            emulator.properties.sm_count,
            kv_dtype=kv_dtype,
            exact=exact,
            sequences=sequences,
            page_len=page_len,
        )
        plan, tensors = MemoryPlan.of(gguf, config, budget), len(gguf.tensors)
        free = [emulator.memory_info()[0]]
        with Weights(gguf, config, emulator) as weights:
            free.append(emulator.memory_info()[0])
            with Session(
                emulator,
                weights,
                24,
                kv_dtype,
                exact=exact,
                sequences=sequences,
                page_len=page_len,
            ):
                free.append(emulator.memory_info()[0])
    parts = len(budget.cache.sizes()) + len(budget.workspace) + len(budget.state.sizes())
    spent = plan.kv_cache + plan.workspace + plan.state
    assert 0 <= free[0] - free[1] - plan.weights <= ALIGNMENT * tensors
    assert 0 <= free[1] - free[2] - spent <= ALIGNMENT * parts


@pytest.mark.parametrize("sequences", [2, 3, 5, 9])
def test_rows_of_prompts_begin_where_kernels_take_them(data: Path, sequences: int) -> None:
    """Beside those of any number of sequences: at multiples of 16 bytes."""
    with Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf:
        budget = SessionBudget.of(Config.from_gguf(gguf), 64, 4, sequences=sequences, page_len=16)
    shapes = ShapeBuckets.of(budget.chunks, budget.cache.max_len, budget.state.rows)
    for decode in range(1, sequences):
        batch = Batch(tuple(range(decode)), (Segment(decode, 0, 3, chooses=True),))
        shape = shapes.of_batch(batch, 9, Output.GREEDY)
        assert 4 * shape.decode % 16 == 0
        assert decode <= shape.decode <= budget.state.rows


def test_a_context_that_the_model_does_not_take_is_refused(data: Path) -> None:
    with Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf:
        config = Config.from_gguf(gguf)
    check_context(config, config.context_length)
    for context in (0, config.context_length + 1):
        with pytest.raises(ModelError, match="the model takes 1 to"):
            check_context(config, context)


def test_sequences_leave_half_of_the_memory_to_pages(
    family_file: Callable[[str], Path], emulator: Device
) -> None:
    """The most of a halving whose states, once more, would fit beside one sequence's pages."""
    with Gguf(family_file("qwen35-dense")) as gguf:
        config = Config.from_gguf(gguf)
        budget = partial(SessionBudget.of, config, 256, 4, page_len=16, keeps_states=False)
        free = emulator.memory_info()[0]

        def needed(count: int) -> int:
            plan = MemoryPlan.of(gguf, config, budget(sequences=count, pages=16))
            assert plan.recurrent == 140288 * count
            return plan.total + 140288 * count + RESERVE_BYTES

        def sequences(nbytes: int) -> int:
            return most_sequences(gguf, config, emulator, budget, nbytes / free, 256)

        assert sequences(2 * needed(256)) == 256
        assert sequences(needed(64) + 4096) == 64
        assert sequences(needed(64) - 4096) == 32
        assert sequences(0) == 1
    with Gguf(family_file("llama-dense")) as gguf:
        config = Config.from_gguf(gguf)
        assert most_sequences(gguf, config, emulator, budget, 0.0, 256) == 256
