"""Every shape that `urdir bench` offers has plans, on a device of paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.shapes import SHAPES, Shape
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.layers.adaptable import room_for
from urdir.model.measure.model_kernels import model_kernels
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.spec import KernelSpec
from urdir.ptxgen.tools.assemble import assemble, is_available

#: Of plans by default: keys of two lengths; with ``--full`` of three.
CONTEXT, LONG = 512, 1024
#: Layers whose kernels are those of all.
LAYERS = 6
MORE_LAYERS = {"lfm2-8b-a1b": 12, "nemotron-h-8b": 12}
#: Where layers differ by the types of their weights alone.
BY_TYPE = {"llama-3.1-70b", "gemma-3-27b"}
#: Where they differ: by that, the place in a pattern, or what they share.
WHOLE = BY_TYPE | {"gemma-4-e4b", "falcon-7b", "deepseek-v2-lite"}


def first_layers(shape: Shape, count: int) -> Shape:
    """A model of the first ``count`` layers, with its numbers for each layer."""
    keys = {
        key: value[:count] if isinstance(value, np.ndarray) and len(value) > count else value
        for key, value in shape.keys.items()
    }
    return replace(shape, layers=count, keys=keys)


#: Whose plans take longest, and have layers that others have, too; all but the smallest and the
#: largest of an architecture; those whose plans `test_ptx_digests.py` makes.
FULL = {
    *("deepseek-v2-lite", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "granite-4.0-h-small"),
    *("llama-3.2-3b", "llama-3.1-8b", "mistral-small-24b", "qwen2.5-1.5b", "qwen2.5-7b"),
    *("qwen3-0.6b", "gemma-3-4b"),
    *("llama-3.2-1b", "llama-3.1-70b", "qwen2.5-0.5b", "qwen3-8b"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in SHAPES],
)
def test_every_shape_has_plans(
    name: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so many layers, unless ``--full``: the kernels of all others but `WHOLE` are the same."""
    config = Config.of(SyntheticModel(name))
    assert config.layers
    if not config.is_causal:
        pytest.skip("encoders have steps of their own")
    is_full = pytestconfig.getoption("--full")
    if name not in WHOLE - BY_TYPE and not is_full:
        monkeypatch.setitem(SHAPES, name, first_layers(SHAPES[name], MORE_LAYERS.get(name, LAYERS)))
    model = SyntheticModel(name)
    context = LONG if is_full else CONTEXT
    kernels = model_kernels(model, Config.of(model), context, "sm_90a", 132)
    assert any(kernel.per_step(prompt=False) for kernel in kernels)
    assert any(kernel.per_step(prompt=True) for kernel in kernels)


#: Bytes that some kernels spill.
SPILT = {("gemma-4-e4b", "flash_decode"): 16}


def launched(name: str) -> set[KernelSpec]:
    """What steps of one to 64 sequences launch on an H200, and steps of prompts."""
    model = SyntheticModel(name)
    config = Config.of(model)
    settings = SessionSettings(min(8192, config.context_length), sequences=64)
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, config, device) as weights,
        Session(device, weights, settings) as session,
    ):
        lengths, chunks = session.shapes.lengths, session.shapes.chunks
        steps = [
            *(
                StepShape(n, k, Output.GREEDY)
                for n in (1, 2, 8, 16, 64)
                for k in lengths[:: len(lengths) - 1 or 1]
            ),
            *(
                StepShape(n, lengths[-1], Output.GREEDY, prompt=n)
                for n in (chunks[0], 64, chunks[-1])
            ),
        ]
        ops = (op for step in steps for op in build_plan(session.parts, step))
        return {
            op.kernel for op in ops if isinstance(op, Launch) and isinstance(op.kernel, KernelSpec)
        }


@pytest.mark.full
@pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
@pytest.mark.parametrize("name", SHAPES)
def test_nothing_that_a_shape_launches_spills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`assemble` fails where wgmma is serialised."""
    if name not in WHOLE:
        monkeypatch.setitem(SHAPES, name, first_layers(SHAPES[name], MORE_LAYERS.get(name, LAYERS)))
    for spec in launched(name):
        target = spec.target_on("sm_90a")
        cost = assemble(spec.ptx(target), target, name=str(spec)).entries[spec.name]
        assert cost.spill_stores <= SPILT.get((name, spec.name), 0), f"{spec}: {cost}"


def test_steps_of_one_row_have_what_their_adapters_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that compute A x have other CTAs after attention to many keys (`fills_sms`)."""
    name = "mistral-small-24b"
    monkeypatch.setitem(SHAPES, name, first_layers(SHAPES[name], 1))
    model = SyntheticModel(name)
    config = Config.of(model)
    config = replace(config, adapters=room_for(config, [], "f16", 1, 16))
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, config, device) as weights,
        Session(device, weights, SessionSettings(LONG, sequences=1)) as session,
    ):
        counts = [
            {
                op.kernel.launch_shape.grid[0]
                for op in build_plan(session.parts, StepShape(1, keys, Output.GREEDY))
                if isinstance(op, Launch) and "lora_counts" in op.args
            }
            for keys in session.shapes.lengths
        ]
    assert counts[0]
    assert counts[0] != counts[-1]
