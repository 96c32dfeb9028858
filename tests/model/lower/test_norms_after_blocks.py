"""Plans of models with norms after their blocks: in decode steps these have no launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.step import build_plan

NORMS = ("post_norm", "branch_norm")
LAYER = ("attn_qkv", "attention", "attn_output", "ffn_gate_up", "ffn_down")


def launches(plan: Plan, layer: int) -> list[str]:
    """Labels of a layer's launches, but for norms of queries and keys."""
    labels = [op.label for op in plan if isinstance(op, Launch)]
    of_layer = (at.removeprefix(f"blk.{layer}.") for at in labels if at.startswith(f"blk.{layer}."))
    return [label for label in of_layer if label not in ("attn_q_norm", "attn_k_norm", "qk_norm")]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["gemma2-dense", "gemma3-dense", "olmo2-dense", "glm4-dense"])
def test_the_next_product_computes_them(
    name: str, exact: bool, reference_file: Callable[[str], Path]
) -> None:
    """Each makes the stream in a buffer that it does not read, and that the next sum reads."""
    path = reference_file(name)
    with Engine.open(path, device="emulator", context=64, exact=exact, sequences=2) as engine:
        parts, layers = engine.session.parts, range(engine.config.n_layers)
        plan = build_plan(parts, StepShape(1, 64, Output.GREEDY))
        several = build_plan(parts, StepShape(2, 64, Output.GREEDY))
        for layer in layers:
            assert tuple(launches(plan, layer)) == LAYER
            norms = [label for label in launches(several, layer) if label in NORMS]
            assert len(norms) == 2
        made = [op.args for op in plan if isinstance(op, Launch) and "stream" in op.args]
        assert len(made) == 2 * len(layers)
        (embedded,) = (op.args["y"] for op in plan if op.label == "token_embd")
        assert made[0]["before"].address == embedded.address
        for args, following in itertools.pairwise(made):
            assert following["before"].address == args["stream"].address
        for args in made:
            assert len({args[role].address for role in ("x", "before", "stream")}) == 3


@pytest.mark.parametrize("name", ["gemma2-dense", "gemma3-dense", "olmo2-dense"])
def test_of_many_rows_they_pack_the_next_vectors(
    name: str, reference_file: Callable[[str], Path]
) -> None:
    """So that there are two launches a layer beside products and attention, whose heads are packed
    by another one."""
    with Engine.open(reference_file(name), device="emulator", context=64, sequences=16) as engine:
        plan = build_plan(engine.session.parts, StepShape(16, 64, Output.GREEDY))
        for layer in range(1, engine.config.n_layers):
            launched = [op for op in plan if isinstance(op, Launch)]
            of_layer = [op for op in launched if op.label.startswith(f"blk.{layer}.")]
            kernels = [op.kernel.name for op in of_layer if not op.label.endswith("output.pack")]
            assert kernels.count("pack_after") == 2
            assert not {"pack", "normalise"} & {*kernels}


EMBEDDED = ("inp_gate", "inp_gate.activation", "proj")


@pytest.mark.parametrize(("name", "end"), [("gemma4-d", ()), ("gemma4-e", EMBEDDED)])
def test_a_layer_s_scale_goes_with_the_sum(
    name: str, end: tuple[str, ...], reference_file: Callable[[str], Path]
) -> None:
    """As Gemma 4 has it at the end of a layer, perhaps after an embedding of its own."""
    with Engine.open(reference_file(name), device="emulator", context=64) as engine:
        parts = engine.session.parts
        plan = build_plan(parts, StepShape(1, 64, Output.GREEDY))
        for layer in range(engine.config.n_layers):
            assert tuple(launches(plan, layer)) == LAYER + end
        scaled = [op for op in plan if isinstance(op, Launch) and "stream_scale" in op.args]
        firsts = [f"blk.{layer}.attn_qkv" for layer in range(1, engine.config.n_layers)]
        assert [op.label for op in scaled] == [*firsts, "output"]
