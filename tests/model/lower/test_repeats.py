"""Layers lowered from the template of another one have the launches that they would have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver.memory import Region
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.shapes import SHAPES, Shape
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.lower.repeats import Repeats
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

LAYERS, CHUNK = 9, 512
#: What the default run has, and why.
SAMPLE = {
    "gemma-3-4b": "windows in five of six layers, norms after networks",
    "gpt-oss-20b": "windows in turns, experts",
    "qwen3.5-4b": "states in three of four layers",
}
OTHERS = (
    *("llama-3.2-1b", "qwen3-30b-a3b", "glm-4.5-air", "command-r7b", "smollm3-3b", "gpt2-xl"),
    *("mamba-2.8b", "deepseek-v4-flash-share"),
)
STEPS = (
    *(StepShape(rows, 256, Output.GREEDY) for rows in (1, 2, 8, 64)),
    *(
        StepShape(rows, 256, output, prompt=rows)
        for rows in (16, CHUNK)
        for output in (Output.NONE, Output.LOGITS)
    ),
    StepShape(20, 256, Output.GREEDY, prompt=16, outputs=4, segments=2),
)


def first_layers(shape: Shape) -> Shape:
    """The same with fewer layers."""
    keys = {
        key: of[:LAYERS] if isinstance(of, np.ndarray) and len(of) == shape.layers else of
        for key, of in shape.keys.items()
    }
    return replace(shape, layers=min(LAYERS, shape.layers), keys=keys)


def launches(plan: Plan) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Label, kernel, and arguments by their places."""
    for op in plan:
        if isinstance(op, Launch):
            args = {
                name: (of.buffer.handle, of.offset, of.nbytes) if isinstance(of, Region) else of
                for name, of in op.args.items()
            }
            yield op.label, op.kernel, args


@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_launches_are_those_of_layers_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = None if name == "gpt-oss-20b" else "q8_0"
    model = SyntheticModel(name, kind, first_layers(SHAPES[name]))
    repeated = []

    def begin(repeats: Repeats, index: int) -> bool:
        repeated.append(whole(repeats, index))
        return repeated[-1]

    whole = Repeats.begin
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, Config.of(model), device) as weights,
        Session(device, weights, SessionSettings(1024, sequences=64, chunk=CHUNK)) as session,
    ):
        for step in STEPS:
            monkeypatch.setattr(Repeats, "begin", begin)
            found = [*launches(build_plan(session.parts, step))]
            monkeypatch.setattr(Repeats, "begin", lambda *_: False)
            assert found == [*launches(build_plan(session.parts, step))], step
    assert any(repeated)
