"""What a step's products become: launches a layer, by rows and by mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from urdir.driver import execute
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine import Engine
from urdir.model.rows import Ending, StepShape
from urdir.model.step import build_plan
from urdir.ptxgen.kernels.tile_matvec import TileMatvec

KEYS = 64


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A model of Q4_K and Q6_K matrices, on the emulator."""
    path = Path(__file__).parent.parent / "data" / "golden" / "nano-llama-q4_k_m.gguf"
    with Engine.open(str(path), device="emulator", context=KEYS, sequences=4) as engine:
        yield engine


def layer(plan: Plan, index: int) -> list[tuple[str, str]]:
    """(label, kernel) of a layer's launches."""
    start = f"blk.{index}."
    return [
        (op.label.removeprefix(start), op.kernel.name)
        for op in plan
        if isinstance(op, Launch) and op.label.startswith(start)
    ]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_decode_step_takes_five_launches_a_layer(engine: Engine, rows: int) -> None:
    plan = build_plan(engine.session.parts, StepShape(rows, KEYS, Ending.GREEDY))
    product = "tile_matvec" if rows == 1 else "batch_matvec"
    for index in range(engine.config.n_layers):
        assert layer(plan, index) == [
            ("attn_qkv", product),
            ("attention", "attention"),
            ("attn_output", product),
            ("ffn_gate_up", product),
            ("ffn_down", product),
        ]


def test_decode_products_take_integer_activations(engine: Engine) -> None:
    plan = build_plan(engine.session.parts, StepShape(1, KEYS, Ending.GREEDY))
    kernels = [op.kernel for op in plan if isinstance(op, Launch)]
    assert {k.activations for k in kernels if isinstance(k, TileMatvec)} == {"i16"}


def test_a_prompt_step_normalises_once_for_several_matrices(engine: Engine) -> None:
    plan = build_plan(engine.session.parts, StepShape(16, KEYS, Ending.PROMPT))
    assert [kernel for _, kernel in layer(plan, 0)] == [
        *("rms_norm", "matmul", "matmul", "matmul", "rope", "kv_append", "prefill_attention"),
        *("matmul", "add", "rms_norm", "matmul", "matmul", "swiglu", "matmul", "add"),
    ]


def test_every_edge_of_a_step_is_programmatic(engine: Engine) -> None:
    """No launch waits for the end of another before it may begin: each waits itself."""
    plan = build_plan(engine.session.parts, StepShape(1, KEYS, Ending.GREEDY))
    with execute.record(plan, engine.device) as graph:
        lines = [line for line in graph.dot().splitlines() if "->" in line]
    assert len(lines) >= len(plan) - 1
    assert all("style=dashed" in line for line in lines)
