"""Prompts of many rows have one shape for all lengths where no launch depends on these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model.engine.test_step_needs import FAMILIES
from urdir.driver.device import Device
from urdir.driver.parallel import completed
from urdir.model.engine.batch import Batch, Output, Segment, StepShape
from urdir.model.engine.budget import SessionBudget
from urdir.model.engine.step import model_launches
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.lower.paper import PaperShapes, paper_parts, paper_weights
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.session_settings import SessionSettings
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH

#: Latent vectors, and blocks of tokens.
LENGTHS_COUNT = {"deepseek2-moe", "kimi-linear-moe", "kimi-k3-moe", "deepseek4"}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_launches_are_the_same_for_any_length(
    name: str, exact: bool, reference_file: Callable[[str], Path], emulator: Device
) -> None:
    """But for how far the last product reads ahead."""
    with Gguf(reference_file(name)) as file:
        config = Config.of(file)
        weights = paper_weights(file, config, emulator)
        settings = SessionSettings(config.context_length, exact=exact, sequences=4)
        budget = SessionBudget.of(weights, settings)
        shapes, target = budget.shapes, emulator.native_target
        assert shapes.one_length == (not exact and name not in LENGTHS_COUNT)
        rows = next(chunk for chunk in shapes.chunks if chunk > MAX_BATCH or exact)
        batch = Batch((), (Segment(0, 0, rows, chooses=True),))
        shape = shapes.of_batch(batch, rows, Output.SAMPLE)
        if not shapes.one_length:
            return
        assert shape.keys == shapes.lengths[-1] > max(rows, 64)
        sizes = budget.cache, budget.recurrent, budget.state, budget.exchange, budget.workspace
        parts = paper_parts(weights, PaperShapes(*sizes), exact)

        def launches(keys: int) -> list[tuple[str, str, list[str]]]:
            sheet = Sheet(parts.work)
            completed(
                model_launches(sheet, parts, StepShape(rows, keys, Output.SAMPLE, prompt=rows))
            )
            return [(of.label, of.kernel.key(target), sorted(of.args)) for of in sheet.launches]

        *short, first_end = launches(max(rows, 64))
        *long, last_end = launches(shape.keys)
        assert short == long
        assert first_end[0] == last_end[0]
