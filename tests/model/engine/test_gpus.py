"""A model on several devices: golden logits, the same tokens as on one, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import gguf as reference
import numpy as np
import pytest

from tests.model.stepping import logits_of_each, set_sampling
from urdir.driver import bindings
from urdir.driver.errors import DriverError, GroupError
from urdir.driver.group import Group
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.answer import Item
from urdir.model.engine.requests.answer_loop import DeviceLostError
from urdir.model.engine.requests.request import Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.errors import SettingsError
from urdir.model.families.config import Config
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.memory import exchange
from urdir.model.memory.weights import Weights, shares_of
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks

DATA = Path(__file__).parents[2] / "data"
EXACT_RELATIVE_RMS = 1e-4
Golden = Callable[[str], tuple[Path, list[int], Any]]
#: Positions that are compared.
FEW = 3
#: Files whose attention and networks are cut on two and on four devices; blocks of 256 are not.
CUT = ("f16", "bf16", "q4_1", "q5_0", "q5_1", "q8_0")


def logits(path: Path, tokens: Sequence[int], device: str, gpus: int) -> Any:
    """After each token, exact."""
    with Engine.open(
        path, device=device, gpus=gpus, context=64, kv_dtype="f32", exact=True
    ) as engine:
        return logits_of_each(engine.session, tokens)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("nano-llama-f32", 2),
        ("nano-llama-q4_0", 4),
        pytest.param("nano-llama-f32", 4, marks=pytest.mark.full),
        pytest.param("nano-llama-q4_0", 2, marks=pytest.mark.full),
        *(
            pytest.param(name, gpus, marks=pytest.mark.full)
            for name in (
                *(f"nano-llama-{kind}" for kind in (*CUT, "q6_k", "q4_k_m")),
                *("nano-qwen2-q4_k_m", "demo-q4_k_m"),
            )
            for gpus in (2, 4)
        ),
    ],
)
def test_exact_mode_matches_golden(
    name: str,
    gpus: int,
    device_name: str,
    needs_gpus: Callable[[int], None],
    golden: Golden,
) -> None:
    needs_gpus(gpus)
    path, tokens, expected = golden(name)
    found = logits(path, tokens[:FEW], device_name, gpus)
    assert relative_rms(found, expected[:FEW]) <= EXACT_RELATIVE_RMS
    assert (found == logits(path, tokens[:FEW], device_name, gpus)).all()


@pytest.mark.full
@pytest.mark.sanitizer
@pytest.mark.parametrize("split", ["tensors", "layers"])
def test_a_prompt_and_tokens_after_it(
    split: Any, device_name: str, needs_gpus: Callable[[int], None], golden: Golden
) -> None:
    """Little enough for compute-sanitizer."""
    needs_gpus(2)
    path, tokens, expected = golden("nano-llama-q8_0")
    settings: dict[str, Any] = {"context": 32, "kv_dtype": "f32", "exact": True}
    with (
        Engine.open(path, device=device_name, gpus=2, split=split, **settings) as engine,
        EagerSteps(engine.session) as eager,
    ):
        eager.feed(tokens[:10])
        rows = [eager.logits()[0]]
        eager.feed([tokens[10]])
        rows.append(eager.logits()[0])
        eager.feed([tokens[11]])
        greedy = eager.step() + eager.step()
    assert relative_rms(np.stack(rows), expected[9:11]) <= EXACT_RELATIVE_RMS
    assert greedy[0] == int(expected[11].argmax())


def test_experts_match_golden(reference_file: Callable[[str], Path]) -> None:
    """Attention with sinks and biases, experts with biases, on two emulated devices."""
    with np.load(DATA / "families" / "gpt-oss-moe.npz") as file:
        tokens, expected = file["tokens"].tolist(), file["logits"]
    found = logits(reference_file("gpt-oss-moe"), tokens[:FEW], "emulator", 2)
    assert relative_rms(found, expected[:FEW]) <= EXACT_RELATIVE_RMS


def open_nano(gpus: int | None, **settings: Any) -> Engine:
    path = DATA / "golden" / "nano-llama-q8_0.gguf"
    return Engine.open(path, device="emulator", gpus=gpus, context=64, **settings)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """On one device, and on two; not exact, with pages."""
    with (
        open_nano(None, sequences=2, page_len=16) as one,
        open_nano(2, sequences=2, page_len=16) as two,
    ):
        yield one, two


def on_both(engines: tuple[Engine, Engine], work: Any) -> list[Any]:
    """What comes of the same work on each, by empty sequences."""
    found = []
    for engine in engines:
        with EagerSteps(engine.session) as eager:
            found.append(work(eager))
    return found


def test_prompts_and_tokens_after_them_have_the_logits_of_one_device(
    engines: tuple[Engine, Engine],
) -> None:
    def work(eager: EagerSteps) -> Any:
        eager.feed([*range(2, 42)])
        first = eager.logits()[0]
        eager.feed([7, 9])
        return np.stack([first, eager.logits()[0]])

    one, two = on_both(engines, work)
    assert relative_rms(two, one) < 2e-3


@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sums_in_two_shots_leave_the_bits_of_those_in_one(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt, whose sums are more than a stage takes at once, and of tokens after it."""
    found = []
    for least, part in ((1 << 20, 1 << 20), (512, 512)):
        monkeypatch.setattr(exchange, "TWO_SHOTS_FROM", {16: least})
        monkeypatch.setattr(exchange, "MOST_PART", part)
        with open_nano(gpus) as engine, EagerSteps(engine.session) as eager:
            shape = engine.session.exchange.shape
            assert (shape.takes_two_shots(512), shape.part) == (least == 512, 512 * (least == 512))
            eager.feed([*range(2, 23)])
            rows = [eager.logits()[0]]
            eager.feed([7])
            found.append([*rows, eager.logits()[0]])
    assert np.array_equal(*found)


def test_greedy_tokens_are_those_of_one_device(engines: tuple[Engine, Engine]) -> None:
    def work(eager: EagerSteps) -> Any:
        eager.feed([5, 80, 13])
        eager.feed([6], 1)
        alone = [eager.step() for _ in range(6)]
        eager.feed([1])
        both = [eager.step((0, 1)) for _ in range(3)]
        return alone, both

    one, two = on_both(engines, work)
    assert one == two


def test_requests_are_answered_by_all_ranks(engines: tuple[Engine, Engine]) -> None:
    """The second one goes on from what the first has left."""
    prompt = (5, 80, 13, *range(40, 60))
    greedy = SamplingSettings(temperature=0.0)

    def work(session: Session) -> Any:
        answers, found = [], []
        for more in ((), (7, 9)):
            request = Request(prompt=(*prompt, *more), settings=greedy, limit=6)
            generation = Generation(session, None, request)
            assert "".join(generation.text()) == ""
            answers.append(generation.tokens)
            found.append(generation.statistics.cached_tokens)
        assert found == [0, len(prompt)]
        return answers

    one, two = (work(engine.session) for engine in engines)
    assert one == two


def test_products_of_one_row_are_given_to_the_other_rank(
    engines: tuple[Engine, Engine],
) -> None:
    for shape in (StepShape(1, 256, Output.GREEDY), StepShape(16, 256, Output.GREEDY, prompt=16)):
        steps = engines[1].session.steps
        given = {of.label: of.kernel for of in steps.bound(shape).plan if "blk.1" in of.label}
        assert given["blk.1.ffn_down"].gives == Gives(
            2, 0, engines[1].session.exchange.shape.capacity
        )
        if not shape.prompt:
            assert isinstance(given["blk.1.attn_qkv"].after, SumOfRanks)


def test_sums_of_several_rows_begin_the_norm_that_follows(engines: tuple[Engine, Engine]) -> None:
    def work(eager: EagerSteps) -> Any:
        eager.feed([5, 80, 13])
        eager.feed([6], 1)
        eager.logits((0, 1))
        eager.feed([9])
        eager.feed([11], 1)
        shape = eager.session.shapes.decode(2, 5, Output.LOGITS)
        launches = {of.label: of.kernel for of in eager.session.steps.bound(shape).plan}
        assert launches["blk.1.attn_qkv"].summarised
        return eager.logits((0, 1))

    one, two = on_both(engines, work)
    assert relative_rms(two, one) < 2e-3


def test_ranks_choose_the_same_tokens_and_remember_them(engines: tuple[Engine, Engine]) -> None:
    """Drawn ones, after a fork that shares pages and a cut: each rank has its own state."""
    session = engines[1].session
    with EagerSteps(session) as eager:
        eager.feed([9, 8, 7, 6])
        eager.fork(0, 1)
        for sequence in range(2):
            settings = SamplingSettings(temperature=1.5, seed=3, nonce=sequence)
            set_sampling(eager, settings, sequence)
        drawn = [eager.step((0, 1), Output.SAMPLE) for _ in range(3)]
        eager.truncate(2, 1)
    states = [session.parts.state, *session.parts.state.followers]
    assert states[1]["known"].download(np.uint32).tolist() == [7, 2]
    assert len({tuple(tokens) for tokens in drawn}) > 1
    tokens, positions = (
        [state[name].download(np.uint32) for state in states] for name in ("tokens", "position")
    )
    assert (tokens[0] == tokens[1]).all()
    assert (positions[0] == positions[1]).all()
    assert tokens[0].reshape(2, -1)[:, 4:7].T.tolist() == drawn


def test_columns_that_are_cut_are_those_of_the_file() -> None:
    with Gguf(demo_model()) as gguf, Group.open("emulator", 2) as group:
        tensor = gguf.tensors["blk.0.ffn_down.weight"]
        whole = reference.quants.dequantize(
            np.array(tensor.data[:]).reshape(tensor.shape[0], -1),
            reference.GGMLQuantizationType(tensor.type_id),
        )
        shares = shares_of(Config.of(gguf), gguf, 2)
        for share, device in zip(shares, group, strict=True):
            down = share.layers[0].dense_networks[0].down
            assert down.matrix.columns is not None
            with Weights.load(gguf, share, device) as weights:
                matrix = weights.matrix(down)
                found = matrix.layout.unpack(matrix.data.download(np.uint8))
            np.testing.assert_allclose(found, whole[:, slice(*down.matrix.columns[0])], rtol=2e-7)


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


@pytest.mark.parametrize("in_prompt", [True, False])
def test_a_fault_on_a_rank_ends_the_engine(api: Any, in_prompt: bool) -> None:
    with open_nano(2) as engine, EagerSteps(engine.session) as eager:
        eager.feed([1, 2, 3])
        if not in_prompt:
            eager.step()[0]
        api.inject("launch", 5)  # of rank 0: what ends first is told
        with pytest.raises(DriverError, match=r"injected fault.*\nrank 0, .*\nrank 1, "):
            [eager.step() for _ in range(3)]
        with pytest.raises(GroupError, match="close the group"):
            engine.group.synchronize()
    assert api.live() == {}


def test_a_step_that_one_rank_is_refused_ends_all_requests(api: Any) -> None:
    with open_nano(2, page_len=16) as engine, Service(engine, None) as service:
        found = SimpleQueue[Item]()
        service.submit(Request(prompt=(5, 80, 13)), found.put)
        assert isinstance(found.get(timeout=100), Piece)
        api.inject("cuGraphLaunch", 2)
        while isinstance(item := found.get(timeout=100), Piece):
            pass
        assert isinstance(item, DeviceLostError)
        assert "rank 1 was refused a step" in str(item)
        assert service.lost is item
    assert api.live() == {}


def test_what_one_device_only_has_is_refused() -> None:
    class Watcher:
        def run(self, bound: Any, stream: Any) -> None:
            raise AssertionError("nothing runs")

    with pytest.raises(SettingsError, match="on one GPU only"):
        open_nano(2, observer=Watcher())
