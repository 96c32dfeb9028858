"""The time until a service has its graphs, and its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from urdir.driver.parallel import completed
from urdir.model.engine.batch import Output
from urdir.model.engine.engine import Engine
from urdir.model.engine.step import KnownLayers, build_plan, building
from urdir.model.measure import graphs


@pytest.mark.slow
def test_parts_of_recording(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urdir.model.engine.requests.warm_up.MOST_GRAPHS", 1)
    monkeypatch.setattr("urdir.model.engine.requests.warm_up.first_shapes", lambda *_: iter(()))
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    path = str(data / "golden" / "nano-llama-q8_0.gguf")
    made = graphs.time_graphs(path, "emulator", 2)
    told = {part: (seconds, note) for part, seconds, note in made}
    assert [name for name in told if name.startswith("graphs of 2")] == [
        "graphs of 2 users, cold",
        "graphs of 2 users, warm",
    ]
    assert all(
        told[f"graphs of 2 users, {state}"][1] == "1 of 1 graphs" for state in ("cold", "warm")
    )
    assert told["opened, warm"][0] < told["graphs of 2 users, warm"][0]
    assert all(told[name][0] > 0 for name in ("planned", "edges and nodes", "instantiated"))
    assert told["planned"][1].startswith("1 steps, ")


def test_layers_are_planned_once(data: Path) -> None:
    """Plans that take known layers are those that are made anew."""
    path = data / "golden" / "nano-llama-q8_0.gguf"
    with Engine.open(path, device="emulator", sequences=3, page_len=16, context=64) as engine:
        session, known = engine.session, KnownLayers()
        outputs = [*Output]
        shapes = [session.shapes.decode(2, 9, output) for output in outputs if output.is_token]
        shapes += [session.shapes.decode(2, 9, Output.GREEDY, steps=4)]
        shapes += [session.shapes.prompt(0, 9, output)[0] for output in outputs]
        plans = [completed(building(session.parts, shape, known=known)) for shape in shapes]
        assert len(known) == 3  # of answers; of prompts, with and without an output
        for shape, plan in zip(shapes, plans, strict=True):
            assert str(plan) == str(build_plan(session.parts, shape))
