"""Steps with prompts beside answers, timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from urdir.driver import Device
from urdir.model.engine.batch import Batch, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step_queue import StepQueue
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.measure import mixed
from urdir.model.measure.mixed import mixed_rows, session_size
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights


@pytest.mark.slow
def test_each_step_has_one_prompt_beside_all_answers(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed, "_STEPS", 2)
    monkeypatch.setattr(mixed, "_RUNS", 1)
    sequences, context = session_size([(2, 16)])
    settings = SessionSettings(context, sequences=sequences)
    launched: list[tuple[int, list[int]]] = []
    launch = StepQueue.launch

    def counted(self: StepQueue, shape: StepShape, batch: Batch, *more: Any, **named: Any) -> None:
        launched.append((len(batch.decode), [s.end - s.start for s in batch.segments]))
        launch(self, shape, batch, *more, **named)

    monkeypatch.setattr(StepQueue, "launch", counted)
    with (
        Device.open("emulator") as device,
        Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf,
        Weights.load(gguf, replace(Config.of(gguf), context_length=1024), device) as weights,
        Session(device, weights, settings) as session,
    ):
        (row,) = mixed_rows(session, [(2, 16)])
    assert (row.sequences, row.rows) == (2, 16)
    assert launched.count((2, [16])) == 2
    assert launched.count((0, [16])) == 2
    both = row.decode_ms + row.prompt_ms
    assert min(row.decode_ms, row.prompt_ms, row.mixed_ms) > 0
    assert row.excess == pytest.approx(row.mixed_ms / both - 1)
