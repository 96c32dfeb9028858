"""The room that is measured for the largest steps is enough for every step of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from urdir.driver.device import Device
from urdir.driver.kernel import signature
from urdir.driver.parallel import completed
from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.budget import SessionBudget
from urdir.model.engine.step import model_launches
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.layers.adaptable import room_for
from urdir.model.lower.paper import PaperShapes, needs_of, paper_parts, paper_weights
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.buckets import COARSE_CHUNKS, COARSE_ROWS, row_buckets
from urdir.model.memory.scored_rows import most_scored, scored_bucket
from urdir.model.memory.session_settings import SessionSettings
from urdir.ptxgen.spec import ceil_div

#: Dense, gated norms of heads, mixtures, latent vectors, states, kept and banked streams.
FAMILIES = (
    *("llama-dense", "gemma2-dense", "gemma4-e", "falcon-dense", "gpt-oss-moe", "qwen3moe-moe"),
    *("deepseek2-moe", "qwen35moe-moe", "falcon-h1-dense", "mamba-dense", "lfm2-dense"),
    *("kimi-linear-moe", "kimi-k3-moe", "minimax-01-moe", "deepseek4"),
)


def steps_of(shapes: ShapeBuckets, rows: int) -> Iterator[StepShape]:
    """Every shape that a session's steps may have; one output stands for all."""
    for keys in {shapes.lengths[0], shapes.lengths[-1]}:
        for count in row_buckets(rows):
            yield StepShape(count, keys, Output.SAMPLE)
        for chunk in shapes.chunks:
            walk = shapes.walked(chunk, [keys])
            of_one = StepShape(chunk, keys, Output.SAMPLE, prompt=chunk, walk=walk)
            yield from (of_one, replace(of_one, scored=scored_bucket(min(chunk, 65), chunk)))
            if shapes.begin_apart:
                yield StepShape(chunk, keys, Output.SAMPLE, prompt=chunk, begins=True)
        for decode in {min(of, shapes.rows) for of in COARSE_ROWS}:
            for chunk in {min(of, shapes.chunks[-1]) for of in COARSE_CHUNKS}:
                most = min(shapes.rows, ceil_div(chunk, shapes.alignment))
                beside = StepShape(
                    decode + chunk,
                    keys,
                    Output.SAMPLE,
                    prompt=chunk,
                    outputs=max(1, decode),
                    segments=most,
                    walk=shapes.walked(decode + chunk, [keys]),
                )
                yield beside
                if decode == shapes.rows:
                    yield replace(beside, scored=most_scored(chunk))


@pytest.mark.turns(4, which=(0, 3))  # exact, too
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES, "llama-dense with adapters"])
def test_every_step_has_room(
    name: str, exact: bool, reference_file: Callable[[str], Path], emulator: Device
) -> None:
    """Also for what outlives a step, and for what is zeros at first."""
    of, *adapted = name.split(" ", 1)
    with Gguf(reference_file(of)) as file:
        config = Config.of(file)
        sequences = 40 if adapted else 20
        if adapted:
            config = replace(config, adapters=room_for(config, [], "f16", 2, 16))
        weights = paper_weights(file, config, emulator)
        context = min(256, config.context_length)
        budget = SessionBudget.of(
            weights, SessionSettings(context, exact=exact, sequences=sequences)
        )
        work = budget.workspace
        shapes = (budget.cache, budget.recurrent, budget.state, budget.exchange)
        parts = paper_parts(weights, PaperShapes(*shapes, work), exact)
        for step in dict.fromkeys(steps_of(budget.shapes, budget.state.rows)):
            sheet = Sheet(parts.work)
            completed(model_launches(sheet, parts, step))
            needs = needs_of(sheet)
            assert needs.room <= work.room, step
            assert not needs.zeroed, "memory that the budget does not have"
            for launch in sheet.launches:
                for role, nbytes, _ in signature(launch.kernel).pointers:
                    assert nbytes <= launch.args[role].nbytes, f"{step}: {launch.label}, {role}"
            assert needs.bound <= needs.room
