"""Mixers with a state in models: operations and steps of a session against numpy.

What a family of `tests/data/families` has is tested there; modules beside this one have in
``EXAMPLES`` what none has, each made of a file's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.mixers.mixer import Example
from tests.model.reference import Reference
from tests.model.stepping import stepping
from urdir.driver.device import Device
from urdir.model.families.config import Config
from urdir.model.families.recurrent import Recurrent
from urdir.model.files.gguf import Gguf
from urdir.model.graph.evaluation import Evaluation
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
#: Tokens of each step: a prompt, tokens one by one, a prompt of fewer than a convolution reads.
PARTS = [5, 1, 1, 2, 2]


def _examples() -> dict[str, Example]:
    stems = (path.stem for path in sorted(Path(__file__).parent.glob("*.py")))
    modules = (import_module(f"tests.model.mixers.{stem}") for stem in stems if "test" not in stem)
    return {name: of for m in modules for name, of in getattr(m, "EXAMPLES", {}).items()}


EXAMPLES = _examples()


@pytest.fixture(params=EXAMPLES)
def made(request: pytest.FixtureRequest, reference_file: Callable[[str], Path]) -> Any:
    """A file, and a description of its weights with an example's mixers."""
    example = EXAMPLES[request.param]
    with Gguf(reference_file(example.file)) as file:
        config = Config.of(file).at_context(64)
        yield file, replace(config, layers=tuple(_changed(of, example) for of in config.layers))


def _changed(layer: Any, example: Example) -> Any:
    def network(branch: Any) -> Any:
        is_mixer = isinstance(branch.network, Recurrent)
        return replace(branch, network=example.change(branch)) if is_mixer else branch

    blocks = (
        replace(of, branches=tuple(network(branch) for branch in of.branches))
        for of in layer.blocks
    )
    return replace(layer, blocks=tuple(blocks))


def test_operations(made: Any) -> None:
    file, config = made
    reference, step = Reference(file, config, 64), StepOps(config, len(TOKENS))
    x = layers(step, embedding(step))
    assert x is not None
    logits = head(step, x)
    found = step.graph.evaluate(Evaluation(reference, TOKENS))[logits]
    golden = reference.logits(TOKENS)
    assert np.abs(found - golden).max() <= 1e-9 * np.abs(golden).max()


@pytest.mark.parametrize(("exact", "allowed"), [(True, 1e-4), (False, 3e-2)])
def test_steps(made: Any, device: Device, exact: bool, allowed: float) -> None:
    file, config = made
    golden = Reference(file, config, 64).logits(TOKENS)
    settings = SessionSettings(64, exact=exact, kv_dtype="f32")
    with (
        Weights.load(file, config, device) as weights,
        stepping(device, weights, settings) as eager,
    ):
        for end, count in zip(accumulate(PARTS), PARTS, strict=True):
            eager.feed(TOKENS[end - count : end])
            assert relative_rms(eager.logits()[0], golden[end - 1]) <= allowed
