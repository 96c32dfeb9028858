"""The memory plan: what is allocated is what was computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from urdir.driver.device import Device
from urdir.model.engine.batch import Batch, Output, Segment, ShapeBuckets
from urdir.model.engine.budget import RESERVE_BYTES, MemoryPlan, SessionBudget, check_context
from urdir.model.engine.draft_pair import file_pair
from urdir.model.engine.fitting import Place, fitting_settings
from urdir.model.engine.session import Session
from urdir.model.engine.speculation.draft import GIVEN
from urdir.model.engine.speculation.draft_convolutions import DYNAMIC
from urdir.model.engine.speculation.markov_tokens import PREVIOUS
from urdir.model.engine.speculation.selected_tokens import CANDIDATES, SUCCESSORS
from urdir.model.errors import ModelError, SettingsError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.lower.paper import paper_weights
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.draft_memory import with_draft
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.memory.workspace import WorkspaceShape
from urdir.ptxgen.kernels.attention.kv_types import KvDtype

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
        config = Config.of(gguf)
        settings = SessionSettings(
            24, kv_dtype, exact=exact, sequences=sequences, page_len=page_len
        )
        budget = SessionBudget.of(paper_weights(gguf, config, emulator), settings)
        plan, tensors = MemoryPlan.of(gguf, config, budget), len(gguf.tensors)
        free = [emulator.memory_info()[0]]
        with Weights(gguf, config, emulator) as weights:
            free.append(emulator.memory_info()[0])
            with Session(emulator, weights, settings):
                free.append(emulator.memory_info()[0])
    parts = len(budget.cache.sizes()) + len(budget.state.sizes())
    parts += len(budget.workspace.sizes())
    spent = plan.kv_cache + plan.workspace + plan.state
    assert plan.total == spent + plan.weights + plan.graphs + plan.staging
    assert 0 <= free[0] - free[1] - plan.weights <= ALIGNMENT * tensors
    assert 0 <= free[1] - free[2] - spent <= ALIGNMENT * parts


@pytest.mark.parametrize("sequences", [2, 3, 5, 9])
def test_rows_of_prompts_begin_where_kernels_take_them(
    data: Path, emulator: Device, sequences: int
) -> None:
    """Beside those of any number of sequences: at multiples of 16 bytes."""
    with Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf:
        settings = SessionSettings(64, sequences=sequences, page_len=16)
        weights = paper_weights(gguf, Config.of(gguf), emulator)
        budget = SessionBudget.of(weights, settings)
    chunks = budget.shapes.chunks
    shapes = ShapeBuckets.of(chunks, budget.cache.max_len, budget.state.rows)
    for decode in range(1, sequences):
        batch = Batch(tuple(range(decode)), (Segment(decode, 0, 3, chooses=True),))
        shape = shapes.of_batch(batch, 9, Output.GREEDY)
        assert 4 * shape.decode % 16 == 0
        assert decode <= shape.decode <= budget.state.rows


def test_a_context_that_the_model_does_not_take_is_refused(data: Path) -> None:
    with Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf:
        config = Config.of(gguf)
    check_context(config, config.context_length)
    for context in (0, config.context_length + 1):
        with pytest.raises(ModelError, match="the model takes 1 to"):
            check_context(config, context)


def test_sequences_leave_half_of_the_memory_to_pages(
    reference_file: Callable[[str], Path], emulator: Device
) -> None:
    """The most of a halving whose states, once more, would fit beside one sequence's pages."""
    with Gguf(reference_file("qwen35-dense")) as gguf:
        config = Config.of(gguf)
        wanted = SessionSettings(256, sequences=256, page_len=16, shared_states=0)
        place = Place(gguf, config, emulator)
        free = emulator.memory_info()[0]

        def needed(count: int) -> int:
            plan = place.plan(wanted, sequences=count, pages=16)
            assert plan.recurrent == 140288 * count
            return plan.total + 140288 * count + RESERVE_BYTES

        def sequences(nbytes: int) -> int:
            return place.most_sequences(wanted, nbytes / free)

        assert sequences(2 * needed(256)) == 256
        assert sequences(needed(64) + 4096) == 64
        assert sequences(needed(64) - 4096) == 32
        assert sequences(0) == 1
    with Gguf(reference_file("llama-dense")) as gguf:
        place = Place(gguf, Config.of(gguf), emulator)
        assert place.most_sequences(wanted, 0.0) == 256


def test_states_to_share_take_a_quarter_of_what_is_left(
    reference_file: Callable[[str], Path], emulator: Device
) -> None:
    """None where sequences could not share them; pages have the rest."""
    free = emulator.memory_info()[0]
    with Gguf(reference_file("qwen35-dense")) as gguf:
        config = Config.of(gguf)
        wanted = SessionSettings(256, sequences=2, page_len=16, shared_states=0)
        place = Place(gguf, config, emulator)
        one = place.plan(wanted, shared_states=1).recurrent - place.plan(wanted).recurrent
        assert one == 140288
        least = place.plan(wanted, pages=16).total + RESERVE_BYTES
        for nbytes, states in ((4 * 9 * one + 999, 9), (4 * one - 999, 0), (-one, 0)):
            assert place.most_states(wanted, (least + nbytes) / free) == states
        assert place.most_states(wanted, 1.0) == 256
        found = fitting_settings(gguf, [(config, emulator)], wanted, memory_share=1.0)
        assert (found.shared_states, found.pages) == (256, 32)
        contiguous = replace(wanted, page_len=0)
        assert place.most_states(contiguous, 1.0) == 0
    for name, states in (("lfm2-dense", 256), ("llama-dense", 0)):  # beside a window; no state
        with Gguf(reference_file(name)) as gguf:
            place = Place(gguf, Config.of(gguf), emulator)
            assert place.most_states(replace(wanted, chunk=16), 1.0) == states


def test_as_many_pages_as_fit(reference_file: Callable[[str], Path], emulator: Device) -> None:
    """Beside those of windows, which are fewer: the next number of pages does not fit."""
    free = emulator.memory_info()[0]
    wanted = SessionSettings(256, sequences=64, page_len=16, chunk=16)
    for name in ("gemma3-dense", "llama-dense"):
        with Gguf(reference_file(name)) as gguf:
            place = Place(gguf, Config.of(gguf), emulator)
            for count in (16, 17, 100, 400, 1023, 1024):
                total = place.plan(wanted, pages=count).total
                for more in (9, 900):
                    share = (total + more + RESERVE_BYTES) / free
                    assert place.most_pages(wanted, share) == count
            assert place.most_pages(wanted, 1.0) == 1024


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context": 0}, "context is 0: expected 1 or more"),
        ({"sequences": 0}, "sequences is 0: expected 1 or more"),
        ({"chunk": -1}, "chunk is -1: expected 1 or more"),
        ({"kv_dtype": "f64"}, "kv_dtype is 'f64': expected f32, f16, bf16, q8_0"),
        ({"page_len": 8}, "page_len is 8: expected 0 or a power of two from 16 on"),
        ({"page_len": 48}, "page_len is 48: expected 0 or a power of two from 16 on"),
        ({"pages": 4}, "pages is 4, page_len is 0: expected pages of a length"),
        ({"shared_states": -1}, "shared_states is -1: expected 0 or more"),
        ({"page_len": 16, "pages": 0}, "pages is 0, page_len is 16: expected 1 or more pages"),
    ],
)
def test_settings_out_of_range_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^{message}"):
        SessionSettings(**{"context": 24, **fields})


def test_what_selects_drafts_has_no_room_for_prompts(reference_file: Callable[[str], Path]) -> None:
    """Vectors of all candidates of a row (DFlash2) are as many values as several streams."""
    names = "target-any", "dflash2-select.draft"
    with Gguf(reference_file(names[0])) as file, Gguf(reference_file(names[1])) as draft:
        pair = file_pair(file, draft)
        cache = CacheShape.of(pair.own, SessionSettings(64), rows=8)
        sizes = [
            with_draft(WorkspaceShape({}), pair.model, cache, 8, chunk, 4, exact=True).kept
            for chunk in (16, 64)
        ]
    rows = pair.model.passed * 8
    for name in (SUCCESSORS, CANDIDATES, DYNAMIC, PREVIOUS):
        assert [of[name] for of in sizes] == [4 * rows * pair.of_drafts[name]] * 2
    assert sizes[0][GIVEN] < sizes[1][GIVEN]
