"""What a step's linear layers become: launches a layer, by rows and by mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.graph import RecordedGraph
from urdir.driver.memory import Slice
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine import runner
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.stored import StoredVector
from urdir.model.lower.parts import device_limits
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.linear.choice import Limits, LinearRequest, choose_linear
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import LinearSpec
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, PORTABLE_CLUSTER
from urdir.ptxgen.target import TESTED
from urdir.ptxgen.weights.formats import FORMATS

KEYS = 64
PATH = Path(__file__).parent.parent.parent / "data" / "golden" / "nano-llama-q4_k_m.gguf"
BOTH_NORMS = ("attn_norm", "ffn_norm")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A model of Q4_K and Q6_K matrices, on the emulator."""
    with Engine.open(str(PATH), device="emulator", context=KEYS, sequences=4) as engine:
        yield engine


def layer(plan: Plan, index: int) -> list[tuple[str, str]]:
    """(label, kernel) of a layer's launches."""
    start = f"blk.{index}."
    return [
        (op.label.removeprefix(start), op.kernel.name)
        for op in plan
        if isinstance(op, Launch) and op.label.startswith(start)
    ]


def products(plan: Plan) -> list[LinearSpec]:
    """The kernels of a plan that multiply few rows with a matrix."""
    kernels = (op.kernel for op in plan if isinstance(op, Launch))
    return [kernel for kernel in kernels if isinstance(kernel, LinearSpec)]


def launches(product: str) -> list[tuple[str, str]]:
    """Those of a layer of a decode step, whose products take that kernel."""
    return [
        ("attn_qkv", product),
        ("attention", "incremental_attention"),
        ("attn_output", product),
        ("ffn_gate_up", product),
        ("ffn_down", product),
    ]


@pytest.mark.parametrize(("rows", "kernel"), [(1, "gemv"), (4, "gemm_small")])
def test_a_decode_step_takes_five_launches_a_layer(engine: Engine, rows: int, kernel: str) -> None:
    plan = build_plan(engine.session.parts, StepShape(rows, KEYS, Output.GREEDY))
    for index in range(engine.config.n_layers):
        assert layer(plan, index) == launches(kernel)
    assert {product.batch for product in products(plan)} == {rows}


@pytest.mark.parametrize(("rows", "kernel"), [(1, "gemv"), (4, "gemv_f32")])
def test_the_exact_mode_keeps_activations_f32(engine: Engine, rows: int, kernel: str) -> None:
    """And takes all rows of a step in one launch."""
    with Session(
        engine.device, engine.weights, SessionSettings(KEYS, exact=True, sequences=4)
    ) as session:
        plan = build_plan(session.parts, StepShape(rows, KEYS, Output.GREEDY))
        for index in range(engine.config.n_layers):
            assert layer(plan, index) == launches(kernel)
        found = products(plan)
        assert {product.batch for product in found} == {rows}
        assert {p.activations for p in found if isinstance(p, Gemv)} <= {"f32"}


def test_unquantised_weights_meet_f32_activations(
    reference_file: Callable[[str], Path],
) -> None:
    with Engine.open(reference_file("nano-llama-f16"), device="emulator", context=KEYS) as engine:
        plan = build_plan(engine.session.parts, StepShape(1, KEYS, Output.GREEDY))
        for product in products(plan):
            assert isinstance(product, Gemv)
            assert product.activations == "f32"


@pytest.mark.parametrize(("rows", "begun"), [(1, False), (4, True)])
def test_norms_begin_where_their_vectors_are_made(engine: Engine, rows: int, begun: bool) -> None:
    """In a batch: all but the first, after the embedding, and each with its own weights."""
    parts, weights = engine.session.parts, engine.weights
    plan = build_plan(parts, StepShape(rows, KEYS, Output.GREEDY))
    launches = [op for op in plan if isinstance(op, Launch) and isinstance(op.kernel, LinearSpec)]
    norms: list[object] = [None]
    names = [f"blk.{layer}.{n}" for layer in range(engine.config.n_layers) for n in BOTH_NORMS]
    for name in (*names[1:], "output_norm"):
        stored = StoredVector.whole(f"{name}.weight", engine.config.hidden)
        norms.append(weights.vector(stored))
    made: list[object] = [None]
    for launch in launches:
        kernel = cast("LinearSpec", launch.kernel)
        if kernel.steps.has(Residual):
            assert kernel.steps.has(BeginNorm) is begun
            made.append(launch.args.get("next_norm"))
            begun_by = cast("Mapping[str, Slice]", launch.args)
        elif kernel.steps.norm is not None:
            assert kernel.steps.has(BegunNorm) is (begun and len(made) > 1)
            assert ("norm" in launch.args) is not kernel.steps.has(BegunNorm)
        if kernel.steps.has(BegunNorm):
            read = cast("Mapping[str, Slice]", launch.args)
            assert read["x"].address == begun_by["scaled"].address
            assert read["x_summary"].address == begun_by["y_summary"].address
    assert made == (norms if begun else [None] * len(norms))


def test_a_launch_leaves_shared_memory_to_the_next(engine: Engine) -> None:
    """No two that add the residual are on an SM at once; each and one that does not may be."""
    limits = engine.device.properties
    plan = build_plan(engine.session.parts, StepShape(1, KEYS, Output.GREEDY))
    taken: dict[bool, set[int]] = {True: set(), False: set()}
    for kernel in products(plan):
        assert isinstance(kernel, Gemv)
        assert kernel.options.sms == limits.sm_count
        assert kernel.options.shared <= limits.shared_per_block_optin
        taken[kernel.steps.has(Residual)].add(1024 + kernel.launch_shape.shared_bytes)
        taken[kernel.steps.has(Residual)].add(
            1024 + max(kernel.options.shared, kernel.options.least_shared)
        )
    assert 2 * min(taken[True]) > limits.shared_per_sm
    assert max(taken[True]) + max(taken[False]) <= limits.shared_per_sm


@pytest.mark.parametrize("target", TESTED)
def test_long_rows_are_left_to_f32_where_they_leave_no_room(target: str) -> None:
    """With the shared memory of any device, no product is refused nor has fewer than four warps."""
    with Device.open(f"emulator:{target}") as device:
        limits, kernels = device_limits(device), []
    for cols in (4096, 8192, 14336, 28672, 53248):
        request = LinearRequest(limits, ((FORMATS["Q8_0"], 32),), cols)
        for residual in (False, True):
            steps = (Residual(),) if residual else ()
            kernels.append(choose_linear(replace(request, steps=steps)))
    for kernel in kernels:
        if isinstance(kernel, Gemv):
            assert kernel.cut.warps >= 4
        else:
            assert kernel.cols > 4096
        assert kernel.launch_shape.shared_bytes <= limits.shared_per_cta
    names = [kernel.name for kernel in kernels]
    assert names[:2] == ["gemv"] * 2
    assert names[-2:] == ["gemv_f32"] * 2


@pytest.mark.parametrize(("target", "cluster"), [("sm_80", 1), ("sm_90", 8), ("sm_120", 8)])
def test_products_know_the_clusters_that_a_device_has(target: str, cluster: int) -> None:
    with Device.open(f"emulator:{target}") as device:
        limits = device_limits(device)
        assert limits.cluster == cluster
        assert (limits.sms, limits.shared_per_sm, limits.shared_per_cta) == (
            device.properties.sm_count,
            device.properties.shared_per_sm,
            device.properties.shared_per_block_optin,
        )


def test_rows_of_several_blocks_are_shared_by_pairs_of_ctas() -> None:
    """In a step of several sequences, where tiles are few; never in one of a single sequence."""
    sm = ARCHITECTURES[90]
    limits = Limits(132, sm.shared, sm.shared_per_cta, PORTABLE_CLUSTER)
    for rows, wanted in ((1, [1, 1, 1, 1]), (4, [1, 2, 2, 1])):
        found = []
        for tiles, cols in ((1, 256), (1, 2048), (6, 2048), (7, 2048)):
            matrices = ((FORMATS["Q4_K"], 16 * 132 * tiles),)
            kernel = choose_linear(LinearRequest(limits, matrices, cols, rows))
            found.append(kernel.launch_shape.cluster[0])
        assert found == wanted


@pytest.mark.parametrize("rows", [2, 4, 5, 8])
def test_activations_of_networks_are_packed_from_four_rows_on(engine: Engine, rows: int) -> None:
    """And heads and norms that a product begins, from five rows on."""
    layers = engine.config.n_layers
    packed = {f"blk.{i}.ffn_down" for i in range(layers) if rows >= 4}
    packs = {f"blk.{i}.ffn_gate_up" for i in range(layers) if rows >= 4}
    if rows >= 5:
        packs |= {f"blk.{i}.attn_output" for i in range(layers)}
        packs |= {f"blk.{i}.ffn_down" for i in range(layers)}
        packed |= {
            f"blk.{i}.{name}" for i in range(layers) for name in ("attn_output", "ffn_gate_up")
        }
        packed |= {"output", *(f"blk.{i}.attn_qkv" for i in range(1, layers))}
    settings = SessionSettings(KEYS, sequences=rows)
    with Session(engine.device, engine.weights, settings) as session:
        plan = build_plan(session.parts, StepShape(rows, KEYS, Output.GREEDY))
    launches = [op for op in plan if isinstance(op, Launch)]
    linear = [op for op in launches if isinstance(op.kernel, LinearSpec)]
    assert {op.label for op in linear if op.kernel.steps.has(PackedOutput)} == packs
    assert {op.label for op in linear if op.kernel.steps.has(PackedInput)} == packed


def test_a_prompt_step_takes_packed_activations(engine: Engine) -> None:
    """Sums, gates and packing are at the end of products and of attention."""
    plan = build_plan(engine.session.parts, StepShape(16, KEYS, Output.NONE, prompt=16))
    assert [kernel for _, kernel in layer(plan, 0)] == [
        *("pack", "gemm_wgmma", "prepare_tokens", "prefill_wgmma"),
        *("gemm_wgmma", "gemm_wgmma", "gemm_wgmma"),
    ]


def test_a_decode_step_of_many_rows_takes_packed_activations() -> None:
    """Attention packs them for the product after it, products the norms that they begin."""
    with Engine.open(str(PATH), device="emulator", context=16, sequences=9) as engine:
        plan = build_plan(engine.session.parts, StepShape(16, 16, Output.GREEDY))
    layers = [[kernel for _, kernel in layer(plan, i)] for i in range(2)]
    rest = ["gemm_wgmma", "incremental_attention", *["gemm_wgmma"] * 3]
    assert layers == [["pack", *rest], rest]


@pytest.mark.slow
def test_many_sequences_get_what_each_gets_alone() -> None:
    """Which rounds activations to integers, not to f16."""
    with (
        Engine.open(str(PATH), device="emulator", context=16, sequences=10) as engine,
        EagerSteps(engine.session) as eager,
    ):
        for first, sequences in ((3, range(9)), (7, [9])):
            for sequence in sequences:
                eager.feed([first + sequence % 9, 141], sequence)
            eager.logits(sequences)
        for sequence in range(10):
            eager.feed([min(7 * sequence, 28)], sequence)
        together, alone = (eager.logits(of) for of in (range(9), [9]))
    assert relative_rms(together[4], alone[0]) < 2e-3


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_portable_prompt_step_takes_packed_activations(target: str) -> None:
    """All but those of attention, packed by a launch."""
    shape = StepShape(16, KEYS, Output.NONE, prompt=16)
    with Engine.open(str(PATH), device=f"emulator:{target}", context=KEYS) as engine:
        plan = build_plan(engine.session.parts, shape)
    assert [kernel for _, kernel in layer(plan, 0)] == [
        *("pack", "gemm_mma", "prepare_tokens", "prefill_attention", "pack", "gemm_mma"),
        *("pack", "gemm_mma", "gemm_mma"),
    ]


def test_a_prompt_step_elsewhere_normalises_once_for_several_matrices() -> None:
    """The sums before the later norms are in the same launches."""
    shape = StepShape(16, KEYS, Output.NONE, prompt=16)
    with Engine.open(str(PATH), device="emulator:sm_75", context=KEYS) as engine:
        plan = build_plan(engine.session.parts, shape)
    assert [kernel for _, kernel in layer(plan, 0)] == [
        *("normalise", "gemm", "gemm", "gemm", "prepare_tokens", "prefill_attention"),
        *("gemm", "normalise", "gemm", "gemm", "activate", "gemm", "normalise"),
    ]
    # of the last layer of all but the last chunk, what later tokens attend to
    assert [kernel for _, kernel in layer(plan, 1)] == ["gemm"] * 3 + ["prepare_tokens"]
    assert len(layer(plan, 0)) + len(layer(plan, 1)) + 1 == len(plan)


def test_only_the_last_row_of_a_prompt_goes_on(engine: Engine) -> None:
    """From the last layer's attention on, in launches of one row."""
    plan = build_plan(engine.session.parts, StepShape(16, KEYS, Output.GREEDY, prompt=16))
    assert [kernel for _, kernel in layer(plan, 1)] == [
        *("gemm_wgmma", "prepare_tokens", "prefill_wgmma"),
        *("gather", "gather", "gemv", "gemv", "gemv"),
    ]
    decode = build_plan(engine.session.parts, StepShape(1, KEYS, Output.GREEDY))
    assert [op.kernel for op in plan][-5:] == [op.kernel for op in decode][-5:]


def test_every_edge_of_a_step_is_programmatic(engine: Engine) -> None:
    """No launch waits for the end of another before it may begin: each waits itself."""
    plan = build_plan(engine.session.parts, StepShape(1, KEYS, Output.GREEDY))
    with execute.record(plan, engine.device) as graph:
        lines = [line for line in graph.dot().splitlines() if "->" in line]
    assert len(lines) >= len(plan) - 1
    assert all("style=dashed" in line for line in lines)


def test_launches_of_prompts_of_few_rows_begin_early(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones fill the device: each begins when the one before is complete."""
    monkeypatch.setattr(runner, "EARLY_ROWS", 16)
    for rows in (16, 32):
        graph = engine.session.steps.graph(StepShape(rows, KEYS, Output.GREEDY, prompt=rows))
        assert isinstance(graph, RecordedGraph)
        assert all(edge.programmatic is (rows == 16) for edge in graph.edges)
        assert len(graph.edges) >= graph.node_count - 1
