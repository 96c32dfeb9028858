"""A model whose layers are on several devices: golden logits, the tokens of one device, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import answer, logits_of, logits_of_each, set_sampling
from urdir.driver import bindings
from urdir.driver.device import Probe
from urdir.driver.errors import DriverError, GroupError
from urdir.model.engine import options
from urdir.model.engine.batch import Batch, Output, Segment
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY, SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.errors import SettingsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.memory.weights import shares_of, weight_sizes
from urdir.model.verify.conformance import relative_rms

DATA = Path(__file__).parents[2] / "data"
EXACT_RELATIVE_RMS = 1e-4
Golden = Callable[[str], tuple[Path, list[int], Any]]
#: Positions that are compared.
FEW = 3


def open_exact(path: Path, device: str, gpus: int | None) -> Engine:
    return Engine.open(
        path, device=device, gpus=gpus, split="layers", context=64, kv_dtype="f32", exact=True
    )


def logits(path: Path, tokens: Sequence[int], device: str, gpus: int | None) -> Any:
    """After each token, exact."""
    with open_exact(path, device, gpus) as engine:
        return logits_of_each(engine.session, tokens)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("nano-llama-f32", 2),
        pytest.param("demo-q4_k_m", 3, marks=pytest.mark.slow),
        *(
            pytest.param(name, 2, marks=pytest.mark.full)
            for name in (
                *(f"nano-llama-{kind}" for kind in ("f16", "q4_0", "q8_0", "q4_k_m")),
                *(f"nano-{kind}-q4_k_m" for kind in ("qwen2", "mixtral")),
            )
        ),
        *(pytest.param("demo-q4_k_m", gpus, marks=pytest.mark.full) for gpus in (2, 4, 6)),
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


def test_prompts_match_golden(
    device_name: str, needs_gpus: Callable[[int], None], golden: Golden
) -> None:
    needs_gpus(2)
    path, tokens, expected = golden("nano-llama-f32")
    with open_exact(path, device_name, 2) as engine:
        found = logits_of(engine.session, tokens[:20])
    assert relative_rms(found, expected[19]) <= EXACT_RELATIVE_RMS


@pytest.mark.parametrize(
    "name",
    [
        "gpt2-dense",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                *("bloom-dense", "gemma4-d", "gemma4-moe", "grok-moe", "minicpm3-dense"),
                *("falcon-h1-dense", "mamba2-dense", "phi2-dense", "qwen3-dense"),
            )
        ),
    ],
)
def test_families_match_golden(name: str, reference_file: Callable[[str], Path]) -> None:
    """Learned positions, latent attention, states, several networks side by side."""
    with np.load(DATA / "families" / f"{name}.npz") as file:
        tokens, expected = file["tokens"].tolist(), file["logits"]
    found = logits(reference_file(name), tokens[:FEW], "emulator", 2)
    assert relative_rms(found, expected[:FEW]) <= EXACT_RELATIVE_RMS


@pytest.fixture(scope="module")
def engines(device_name: str, urdir_probe: Probe) -> Iterator[tuple[Engine, Engine]]:
    """On one device, and on two; not exact, with pages, prompts in chunks of 32."""
    if device_name == "cuda" and len(urdir_probe.devices) < 2:
        pytest.skip("needs 2 GPUs")
    path = DATA / "golden" / "nano-llama-q8_0.gguf"
    settings: dict[str, Any] = {"context": 128, "sequences": 3, "page_len": 16, "chunk": 32}
    with (
        Engine.open(path, device=device_name, **settings) as one,
        Engine.open(path, device=device_name, gpus=2, split="layers", **settings) as two,
    ):
        yield one, two


def on_both(engines: tuple[Engine, Engine], work: Callable[[EagerSteps], Any]) -> list[Any]:
    """What comes of the same work on each, by empty sequences."""
    found = []
    for engine in engines:
        with EagerSteps(engine.session) as eager:
            found.append(work(eager))
    return found


def test_the_chunks_of_a_prompt_follow_each_other(engines: tuple[Engine, Engine]) -> None:
    def work(eager: EagerSteps) -> Any:
        eager.feed([*range(2, 102)])
        first = eager.logits()[0]
        eager.feed([7, 9])
        return np.stack([first, eager.logits()[0]])

    one, two = on_both(engines, work)
    assert (one == two).all()


@pytest.mark.parametrize(("split", "rows"), [("layers", 16), ("tensors", 64)])
def test_prompts_are_cut_so_that_every_rank_has_work(
    split: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MOST_PASSED_CHUNK", 16)
    path = DATA / "golden" / "nano-llama-q8_0.gguf"
    with Engine.open(path, device="emulator", gpus=2, split=split, context=64) as engine:
        assert engine.session.shapes.chunks[-1] == rows


def test_greedy_tokens_are_those_of_one_device(engines: tuple[Engine, Engine]) -> None:
    """Of one sequence and of two, after a cut."""

    def work(eager: EagerSteps) -> Any:
        eager.feed([5, 80, 13])
        eager.feed([6], 1)
        alone = [eager.step() for _ in range(9)]
        eager.truncate(6)
        eager.feed([1])
        return alone, [eager.step((0, 1)) for _ in range(6)]

    one, two = on_both(engines, work)
    assert one == two


def test_answers_are_those_of_one_device(engines: tuple[Engine, Engine]) -> None:
    """One that is left early, one that goes on from it, and one that ends on the device."""

    def work(session: Session) -> Any:
        request = Request(prompt=(5, 80, 13), settings=GREEDY)
        left = Generation(session, None, request)
        with closing(left.pieces()) as pieces:
            begun = [next(pieces).choices[0].token for _ in range(3)]
        more = answer(session, [5, 80, 13, *begun, 1], 6)
        ends = range(0, 400, 2)
        drawn = SamplingSettings(temperature=1.5, seed=3)
        return begun, more, answer(session, [9, 8, 7, 6], 20, drawn, ends)

    one, two = (work(engine.session) for engine in engines)
    assert one == two


def test_drawn_tokens_are_those_of_one_device(engines: tuple[Engine, Engine]) -> None:
    """After a fork that shares pages."""

    def work(eager: EagerSteps) -> Any:
        eager.feed([9, 8, 7, 6])
        eager.fork(0, 1)
        for sequence in range(2):
            settings = SamplingSettings(temperature=1.5, seed=3, nonce=sequence)
            set_sampling(eager, settings, sequence)
        drawn = [eager.step((0, 1), Output.SAMPLE) for _ in range(3)]
        return [*drawn, *(eager.step((0,), Output.SAMPLE) for _ in range(4))]

    one, two = on_both(engines, work)
    assert one == two


def test_steps_of_tokens_and_prompts_are_those_of_one_device(
    engines: tuple[Engine, Engine],
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

    one, two = on_both(engines, work)
    assert one == two


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


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver of the devices that the test opens."""
    made = bindings.emulated(device_count=2)
    monkeypatch.setattr(bindings, "emulated", lambda *_, **__: made)
    return made


def open_two(**settings: Any) -> Engine:
    path = DATA / "golden" / "nano-llama-q8_0.gguf"
    return Engine.open(path, device="emulator", gpus=2, split="layers", context=64, **settings)


@pytest.mark.parametrize("function", ["cuMemcpyPeerAsync", "cuEventRecord", "cuGraphLaunch"])
def test_a_step_that_was_queued_in_part_is_done_again(api: Any, function: str) -> None:
    with open_two() as engine, EagerSteps(engine.session) as eager:
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


def test_a_fault_on_a_rank_ends_the_engine(api: Any) -> None:
    with open_two() as engine, EagerSteps(engine.session) as eager:
        eager.feed([1, 2, 3])
        eager.step()
        api.inject("launch", 20)
        with pytest.raises(DriverError, match=r"injected fault.*\nrank 0, .*\nrank 1, "):
            [eager.step() for _ in range(3)]
        with pytest.raises(GroupError, match="close the group"):
            engine.group.synchronize()
    assert api.live() == {}


def test_what_is_not_split_is_refused(reference_file: Callable[[str], Path]) -> None:
    def refused(path: Path, gpus: int, why: str) -> None:
        with pytest.raises(UnsupportedError, match=why):
            Engine.open(path, device="emulator", gpus=gpus, split="layers")

    refused(reference_file("gemma4-e"), 2, "layers that share a cache")
    refused(reference_file("lfm2-dense"), 2, "layers of different kinds")
    refused(reference_file("nano-llama-f32"), 3, "2 layers cannot be split between 3 GPUs")
    refused(reference_file("gemma3-dense"), 2, "layers of different kinds")

    class Watcher:
        def run(self, bound: Any, stream: Any) -> None:
            raise AssertionError("nothing runs")

    with pytest.raises(SettingsError, match="on one GPU only"):
        open_two(observer=Watcher())
    with pytest.raises(SettingsError, match="split is 'rows': expected tensors or layers"):
        Engine.open(device="emulator", gpus=2, split="rows")  # type: ignore[arg-type]
