"""A model on several devices, split by tensors or layers: golden logits, tokens of one, faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import gguf as reference
import numpy as np
import pytest

from tests.model.stepping import answer, set_sampling
from tests.patience import PATIENCE
from urdir.driver import bindings
from urdir.driver.device import Probe
from urdir.driver.errors import DriverError, GroupError
from urdir.driver.group import Group
from urdir.model.engine import options
from urdir.model.engine.batch import Batch, Output, Segment, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.logits import logprobs_of
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.request import Item, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import GREEDY, SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.errors import SettingsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense
from urdir.model.families.share import cut_networks
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.memory import exchange
from urdir.model.memory.weight_sizes import shares_of, weight_sizes
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.exchange.gives import Gives
from urdir.ptxgen.kernels.linear.epilogue.send import Send
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.kernels.linear.prologue.sum import RankAdd

DATA = Path(__file__).parents[2] / "data"
NANO = DATA / "golden" / "nano-llama-q8_0.gguf"
FAMILIES = sorted(p.name.removesuffix(".gguf.xz") for p in (DATA / "families").glob("*.gguf.xz"))
EXACT_RELATIVE_RMS = 1e-4
Golden = Callable[[str], tuple[Path, list[int], Any]]
#: Tokens of a prompt, and of those that are fed one after the other.
PROMPT, MORE = 3, 1
each_split = pytest.mark.parametrize("split", ["tensors", "layers"])

# ---- golden logits ----


def logits(eager: EagerSteps, tokens: Sequence[int], prompt: int = PROMPT) -> Any:
    """After a prompt, and after each token of more."""
    eager.truncate(0)
    eager.feed(tokens[:prompt])
    rows = [eager.logits()[0]]
    for token in tokens[prompt:]:
        eager.feed([token])
        rows.append(eager.logits()[0])
    return np.stack(rows)


def check_golden(
    path: Path, tokens: Sequence[int], expected: Any, prompt: int = PROMPT, **settings: Any
) -> Config:
    """Exact logits are the expected ones, and the same again; the first rank's description."""
    tokens = tokens[: prompt + MORE]
    with (
        Engine.open(path, context=48, kv_dtype="f32", exact=True, **settings) as engine,
        EagerSteps(engine.session) as eager,
    ):
        found = logits(eager, tokens, prompt)
        assert relative_rms(found, expected[prompt - 1 : prompt + MORE]) <= EXACT_RELATIVE_RMS
        assert (found == logits(eager, tokens, prompt)).all()
        return engine.session.parts.config


#: (split, file, devices) of the default run.
QUICK = (
    ("tensors", "nano-llama-q4_0", 4),
    ("layers", "nano-llama-f32", 2),
)
#: Files whose attention and networks are cut on two and on four devices; blocks of 256 are not.
CUT = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
LLAMAS = [f"nano-llama-{kind}" for kind in (*CUT, "q6_k", "q4_k_m")]
OTHERS = [
    *(("tensors", name, n) for n in (2, 4) for name in (*LLAMAS, "nano-qwen2-q4_k_m")),
    *(("layers", name, 2) for name in (*LLAMAS, "nano-qwen2-q4_k_m", "nano-mixtral-q4_k_m")),
    *((split, "demo-q4_k_m", n) for split in ("tensors", "layers") for n in (2, 4)),
    *(("layers", "demo-q4_k_m", n) for n in (3, 6)),
]


@pytest.mark.parametrize(
    ("split", "name", "gpus"),
    [
        *QUICK,
        *(pytest.param(*c, marks=pytest.mark.full) for c in OTHERS if c not in QUICK),
    ],
)
def test_exact_mode_matches_golden(
    split: Any,
    name: str,
    gpus: int,
    device_name: str,
    needs_gpus: Callable[[int], None],
    golden: Golden,
) -> None:
    needs_gpus(gpus)
    prompt = 20 if name == "nano-llama-f32" else PROMPT
    check_golden(*golden(name), prompt, device=device_name, gpus=gpus, split=split)


#: (split, family, devices) of the default run. Attention has two heads in these files, and one
#: where it is latent or a delta rule with a gate for each key: `test_random_models` has more.
QUICK_FAMILIES = (
    ("tensors", "minicpm3-dense", 2),
    ("layers", "gemma4-d", 2),  # the last operation of a layer would work in place
)
#: Learned positions, latent attention, states, several networks side by side.
BY_LAYERS = (
    *("bloom-dense", "gemma4-d", "gemma4-moe", "gpt2-dense", "grok-moe", "minicpm3-dense"),
    *("falcon-h1-dense", "mamba2-dense", "phi2-dense", "qwen3-dense"),
)
OTHER_FAMILIES = [
    *(("tensors", name, gpus) for name in FAMILIES for gpus in (2, 4)),
    *(("layers", name, 2) for name in BY_LAYERS),
]
#: No network can be cut: one has heads with ALiBi alone, another has heads too few.
WHOLE = {("refact-moe", 2), ("refact-moe", 4), ("mamba2-dense", 4)}
#: Two heads, or attention to compressed blocks, and networks too narrow for four.
WHOLE |= {
    *(("deepseek4", 4), ("grovemoe-moe", 4), ("qwen-dense", 4), ("qwen4exp", 4), ("step35-moe", 4))
}
#: Time mixing and norms of inner values are not cut either.
WHOLE |= {(f"{name}-dense", gpus) for name in ("bitnet", "rwkv6", "rwkv7") for gpus in (2, 4)}


@pytest.mark.parametrize(
    ("split", "name", "gpus"),
    [
        *QUICK_FAMILIES,
        *(
            pytest.param(*c, marks=pytest.mark.full)
            for c in OTHER_FAMILIES
            if c not in QUICK_FAMILIES
        ),
    ],
)
def test_families_match_golden(
    split: Any,
    name: str,
    gpus: int,
    reference_file: Callable[[str], Path],
    device_name: str,
    needs_gpus: Callable[[int], None],
) -> None:
    """Split by tensors, some networks of each are cut."""
    needs_gpus(gpus)
    with np.load(DATA / "families" / f"{name}.npz") as file:
        tokens, expected = file["tokens"].tolist(), file["logits"]
    config = check_golden(
        reference_file(name), tokens, expected, device=device_name, gpus=gpus, split=split
    )
    if split == "tensors":
        cut, _ = cut_networks(config)
        assert (cut == 0) == ((name, gpus) in WHOLE)


@pytest.mark.full
@pytest.mark.sanitizer
@each_split
def test_a_prompt_and_tokens_after_it(
    split: Any, device_name: str, needs_gpus: Callable[[int], None], golden: Golden
) -> None:
    """Little enough for compute-sanitizer."""
    needs_gpus(2)
    check_golden(*golden("nano-llama-q8_0"), 10, device=device_name, gpus=2, split=split)


# ---- as on one device ----


def open_nano(gpus: int | None, split: Any = "tensors", **settings: Any) -> Engine:
    return Engine.open(
        NANO, **{"device": "emulator", "gpus": gpus, "split": split, "context": 128, **settings}
    )


@pytest.fixture(scope="module")
def one(device_name: str) -> Iterator[Engine]:
    """On one device: not exact, with pages, prompts in chunks of 32."""
    with open_nano(None, device=device_name, sequences=3, page_len=16, chunk=32) as engine:
        yield engine


@pytest.fixture(scope="module", params=["tensors", "layers"])
def two(
    request: pytest.FixtureRequest, device_name: str, urdir_probe: Probe
) -> Iterator[tuple[Engine, str]]:
    """The same on two, and how it is split."""
    if device_name == "cuda" and len(urdir_probe.devices) < 2:
        pytest.skip("needs 2 GPUs")
    settings: Any = {"device": device_name, "sequences": 3, "page_len": 16, "chunk": 32}
    with open_nano(2, request.param, **settings) as engine:
        yield engine, request.param


tensors_alone = pytest.mark.parametrize("two", ["tensors"], indirect=True)


def on_both(one: Engine, two: Engine, work: Callable[[EagerSteps], Any]) -> list[Any]:
    """What comes of the same work on each, by empty sequences."""
    found = []
    for engine in (one, two):
        with EagerSteps(engine.session) as eager:
            found.append(work(eager))
    return found


def test_prompts_and_tokens_after_them_have_the_logits_of_one_device(
    one: Engine, two: tuple[Engine, str]
) -> None:
    """Several chunks of a prompt, which follow each other from rank to rank where those have
    layers: no product begins the norm of another rank's first layer, which is rounded otherwise."""

    def work(eager: EagerSteps) -> Any:
        eager.feed([*range(2, 102)])
        first = eager.logits()[0]
        eager.feed([7, 9])
        return np.stack([first, eager.logits()[0]])

    engine, split = two
    expected, found = on_both(one, engine, work)
    assert relative_rms(found, expected) < (2e-3 if split == "tensors" else 2e-4)
    names = {graph.device.name for graph in engine.session.steps.graphs}
    assert names == {device.name for device in engine.group}


@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sums_in_two_shots_leave_the_bits_of_those_in_one(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt, whose sums are more than a stage takes at once, and of tokens after it."""
    found = []
    for least, part in ((1 << 20, 1 << 20), (512, 512)):
        monkeypatch.setattr(exchange, "TWO_SHOTS_FROM", {16: least})
        monkeypatch.setattr(exchange, "MOST_PART", part)
        with open_nano(gpus, context=64) as engine, EagerSteps(engine.session) as eager:
            shape = engine.session.exchange.shape
            assert (shape.takes_two_shots(512), shape.part) == (least == 512, 512 * (least == 512))
            found.append(logits(eager, [*range(2, 23), 7], 21))
    assert np.array_equal(*found)


@pytest.mark.parametrize(("split", "rows"), [("layers", 16), ("tensors", 64)])
def test_prompts_are_cut_so_that_every_rank_has_work(
    split: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MOST_PASSED_CHUNK", 16)
    with open_nano(2, split, context=64) as engine:
        assert engine.session.shapes.chunks[-1] == rows


@pytest.mark.turns(2)
def test_tokens_are_those_of_one_device(one: Engine, two: tuple[Engine, str]) -> None:
    """Greedy ones of one sequence and of two, after a cut; drawn ones, after a fork that shares
    pages."""

    def work(eager: EagerSteps) -> Any:
        eager.feed([5, 80, 13])
        eager.feed([6], 1)
        alone = [eager.step() for _ in range(5)]
        eager.truncate(4)
        eager.feed([1])
        both = [eager.step((0, 1)) for _ in range(3)]
        eager.fork(0, 2)
        for sequence in (0, 2):
            settings = SamplingSettings(temperature=1.5, seed=3, nonce=sequence)
            set_sampling(eager, settings, sequence)
        drawn = [eager.step((0, 2), Output.SAMPLE) for _ in range(3)]
        return alone, both, drawn, eager.step((0,), Output.SAMPLE)

    expected, found = on_both(one, two[0], work)
    assert found == expected


@pytest.mark.turns(2, which=1)
def test_steps_of_tokens_and_prompts_are_those_of_one_device(
    one: Engine, two: tuple[Engine, str]
) -> None:
    def work(eager: EagerSteps) -> Any:
        eager.feed([5, 80, 13])
        eager.step()
        eager.feed([*range(40, 50)], 1)
        eager.feed([*range(60, 80)], 2)
        eager.launch(Batch((), (Segment(2, 0, 12),)), Output.NONE)
        eager.launch(Batch((0,), (Segment(1, 0, 10, chooses=True),)), Output.GREEDY)
        chosen = eager.session.parts.state["sampled"].download(np.uint32, 2).tolist()
        for sequence, token in zip((0, 1), chosen, strict=True):
            eager.tokens[sequence].append(token)
        return chosen, eager.step((0, 1, 2))

    expected, found = on_both(one, two[0], work)
    assert found == expected


@pytest.mark.turns(2)
def test_answers_are_those_of_one_device(one: Engine, two: tuple[Engine, str]) -> None:
    """One that is left early, one that goes on from it, and one that ends on the device."""

    def work(session: Session) -> Any:
        left = Generation(session, None, Request(prompt=(5, 80, 13), settings=GREEDY))
        with closing(left.pieces()) as pieces:
            begun = [next(pieces).choices[0].token for _ in range(3)]
        more = Request(prompt=(5, 80, 13, *begun, 1), settings=GREEDY, limit=6)
        generation = Generation(session, None, more)
        assert "".join(generation.text()) == ""
        assert generation.statistics.cached_tokens >= 3
        ends = range(0, 400, 2)
        drawn = SamplingSettings(temperature=1.5, seed=3)
        return begun, generation.tokens, answer(session, [9, 8, 7, 6], 20, drawn, ends)

    assert work(two[0].session) == work(one.session)


@pytest.mark.full
def test_log_probabilities_of_prompts_are_those_of_one_device(
    one: Engine, two: tuple[Engine, str]
) -> None:
    prompt = [*range(5, 42)]
    found, wanted = (logprobs_of(of.session, prompt) for of in (two[0], one))
    np.testing.assert_allclose(found, wanted, atol=5e-3)


@tensors_alone
def test_products_of_one_row_are_given_to_the_other_rank(two: tuple[Engine, str]) -> None:
    session = two[0].session
    for shape in (StepShape(1, 256, Output.GREEDY), StepShape(16, 256, Output.GREEDY, prompt=16)):
        given = {
            of.label: of.kernel for of in session.steps.bound(shape).plan if "blk.1" in of.label
        }
        send = given["blk.1.ffn_down"].steps.find(Send)
        assert send.gives == Gives(2, 0, session.exchange.shape.capacity)
        if not shape.prompt:
            assert given["blk.1.attn_qkv"].steps.has(RankAdd)


@tensors_alone
def test_sums_of_several_rows_begin_the_norm_that_follows(
    one: Engine, two: tuple[Engine, str]
) -> None:
    def work(eager: EagerSteps) -> Any:
        eager.feed([5, 80, 13])
        eager.feed([6], 1)
        eager.logits((0, 1))
        eager.feed([9])
        eager.feed([11], 1)
        shape = eager.session.shapes.decode(2, 5, Output.LOGITS)
        launches = {of.label: of.kernel for of in eager.session.steps.bound(shape).plan}
        assert launches["blk.1.attn_qkv"].steps.has(BegunNorm)
        return eager.logits((0, 1))

    expected, found = on_both(one, two[0], work)
    assert relative_rms(found, expected) < 2e-3


@tensors_alone
def test_ranks_choose_the_same_tokens_and_remember_them(two: tuple[Engine, str]) -> None:
    """Drawn ones, after a fork that shares pages and a cut: each rank has its own state."""
    session = two[0].session
    with EagerSteps(session) as eager:
        eager.feed([9, 8, 7, 6])
        eager.fork(0, 1)
        for sequence in range(2):
            settings = SamplingSettings(temperature=1.5, seed=3, nonce=sequence)
            set_sampling(eager, settings, sequence)
        drawn = [eager.step((0, 1), Output.SAMPLE) for _ in range(3)]
        eager.truncate(2, 1)
    states = [session.parts.state, *session.parts.state.followers]
    assert states[1]["known"].download(np.uint32)[:2].tolist() == [7, 2]
    assert len({tuple(tokens) for tokens in drawn}) > 1
    tokens, positions = (
        [state[name].download(np.uint32) for state in states] for name in ("tokens", "position")
    )
    assert (tokens[0] == tokens[1]).all()
    assert (positions[0] == positions[1]).all()
    assert tokens[0].reshape(3, -1)[:2, 4:7].T.tolist() == drawn


# ---- what each rank has ----


def test_columns_that_are_cut_are_those_of_the_file() -> None:
    with Gguf(demo_model()) as gguf, Group.open("emulator", 2) as group:
        tensor = gguf.tensors["blk.0.ffn_down.weight"]
        whole = reference.quants.dequantize(
            np.array(tensor.data[:]).reshape(tensor.shape[0], -1),
            reference.GGMLQuantizationType(tensor.type_id),
        )
        shares = shares_of(Config.of(gguf), gguf, 2)
        for share, device in zip(shares, group, strict=True):
            (*_, dense) = share.layers[0].networks
            assert isinstance(dense, Dense)
            down = dense.down
            assert down.matrix.columns is not None
            with Weights.load(gguf, share, device) as weights:
                matrix = weights.matrix(down)
                found = matrix.layout.unpack(matrix.data.download(np.uint8))
            np.testing.assert_allclose(found, whole[:, slice(*down.matrix.columns[0])], rtol=2e-7)


def test_each_rank_has_its_layers_alone() -> None:
    with Gguf(demo_model()) as gguf:
        config = Config.of(gguf)
        stages = shares_of(config, gguf, 3, "layers")
        assert sum((stage.layers for stage in stages), ()) == config.layers
        whole = weight_sizes(gguf, config)
        parts = [weight_sizes(gguf, stage) for stage in stages]
    assert {name for part in parts for name in part} == set(whole)
    assert all(part[name] == whole[name] for part in parts for name in part)
    assert ["token_embd.weight" in part for part in parts] == [True, False, False]
    sizes = [sum(part.values()) for part in parts]
    assert max(sizes) < 1.5 * sum(whole.values()) / 3
    assert [stage.stage.first for stage in stages if stage.stage] == [
        sum(len(before.layers) for before in stages[:rank]) for rank in range(3)
    ]


# ---- faults ----


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver of the devices that the test opens."""
    made = bindings.emulated(device_count=2)
    monkeypatch.setattr(bindings, "emulated", lambda *_, **__: made)
    return made


@pytest.mark.parametrize("nth", [2, 25])
def test_a_fault_while_loading_leaves_nothing_open(api: Any, nth: int) -> None:
    api.inject("launch", nth)
    with pytest.raises(DriverError, match="injected fault"):
        open_nano(2)
    assert api.live() == {}


@pytest.mark.parametrize("function", ["cuMemcpyPeerAsync", "cuEventRecord", "cuGraphLaunch"])
def test_a_step_that_was_queued_in_part_is_done_again(api: Any, function: str) -> None:
    with open_nano(2, "layers") as engine, EagerSteps(engine.session) as eager:
        tokens = []
        for is_failing in (False, True):
            eager.truncate(0)
            eager.feed([1, 2, 3])
            first = eager.step()[0]
            if is_failing:
                api.inject(function, nth=2)
                with pytest.raises(DriverError, match=function.removesuffix("Async")):
                    eager.step()
            tokens.append([first, eager.step()[0], eager.step()[0]])
        assert tokens[0] == tokens[1]
    assert api.live() == {}


@pytest.mark.parametrize(
    ("split", "nth", "in_prompt"),
    [
        pytest.param("tensors", 5, True, marks=pytest.mark.full),
        ("tensors", 5, False),
        ("layers", 20, False),
    ],
)
def test_a_fault_on_a_rank_ends_the_engine(api: Any, split: str, nth: int, in_prompt: bool) -> None:
    with open_nano(2, split) as engine, EagerSteps(engine.session) as eager:
        eager.feed([1, 2, 3])
        if not in_prompt:
            eager.step()
        api.inject("launch", nth)  # of rank 0: what ends first is told
        with pytest.raises(DriverError, match=r"injected fault.*\nrank 0, .*\nrank 1, "):
            [eager.step() for _ in range(3)]
        with pytest.raises(GroupError, match="close the group"):
            engine.group.synchronize()
    assert api.live() == {}


def test_a_step_that_one_rank_is_refused_ends_all_requests(api: Any) -> None:
    with open_nano(2, page_len=16) as engine, Service(engine, None) as service:
        found, begun = SimpleQueue[Item](), threading.Event()

        def note(item: Item) -> None:
            if not begun.is_set():
                begun.set()
                api.inject("cuGraphLaunch", 2)  # between two steps, of two launches each
            found.put(item)

        service.submit(Request(prompt=(5, 80, 13)), note)
        assert isinstance(found.get(timeout=PATIENCE), Piece)
        while isinstance(item := found.get(timeout=PATIENCE), Piece):
            pass
        assert isinstance(item, DeviceLostError)
        assert "rank 1 was refused a step" in str(item)
        assert service.lost is item
    assert api.live() == {}


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "gpus", "why"),
    [
        ("gemma4-e", 2, "layers that share a cache"),
        ("lfm2-dense", 2, "layers of different kinds"),
        ("nano-llama-f32", 3, "2 layers cannot be split between 3 GPUs"),
        ("gemma3-dense", 2, "layers of different kinds"),
    ],
)
def test_what_is_not_split_by_layers_is_refused(
    name: str, gpus: int, why: str, reference_file: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        Engine.open(reference_file(name), device="emulator", gpus=gpus, split="layers")


@each_split
def test_what_one_device_only_has_is_refused(split: str) -> None:
    class Watcher:
        def run(self, bound: Any, stream: Any) -> None:
            raise AssertionError("nothing runs")

    with pytest.raises(SettingsError, match="on one GPU only"):
        open_nano(2, split, observer=Watcher())


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(SettingsError, match="split is 'rows': expected tensors or layers"):
        open_nano(2, "rows")
