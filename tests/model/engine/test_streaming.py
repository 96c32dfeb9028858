"""Weights in host memory: results are those of weights on the device, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.model.stepping import answer, logits_of, logits_of_each, stepping
from urdir.driver import bindings
from urdir.driver.device import Device
from urdir.driver.errors import DriverError, OutOfMemoryError
from urdir.driver.group import Group
from urdir.driver.streamed import is_transfer
from urdir.model.engine import placing
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.budget import RESERVE_BYTES
from urdir.model.engine.engine import Engine
from urdir.model.engine.fitting import Place
from urdir.model.engine.placing import Ranks, fitting_names
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError, SettingsError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.placement import Placement, streamable, with_streaming
from urdir.model.families.shapes import SHAPES
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.files.gguf import Gguf
from urdir.model.memory import streamed
from urdir.model.memory.expert_cache import ExpertCache
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weight_sizes import shares_of, streamed_nbytes, weight_sizes
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.experts.place import parts_of

DATA = Path(__file__).parents[2] / "data"
#: Mixtures of the default run, and why.
SAMPLE = {"gpt-oss-moe": "biases", "qwen3moe-moe": "products that choose their experts"}
#: Models of such families without experts.
DENSE = {"ernie4_5-moe", "nemotron_h_moe-dense", "paddleocr-moe", "refact-moe"}
#: Mixtures whose names do not say so.
OTHERS = {"deepseek32", "deepseek4", "dots3note", "glm-dsa-shared", "glm5-next", "hy_v4"}
OTHERS |= {"qwen4exp"}
MIXTURES = sorted(
    {path.name.partition(".")[0] for path in (DATA / "families").glob("*moe*.gguf.xz")}.union(
        OTHERS
    ).difference(SAMPLE, DENSE)
)
NAMES = [*SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in MIXTURES)]
NANO = DATA / "golden" / "nano-llama-q8_0.gguf"
EXPERTS = Placement(host_experts=99)
CACHED = replace(EXPERTS, expert_slots=2)
ALL_CACHED = replace(CACHED, gpu_layers=0)
each_split = pytest.mark.parametrize("split", ["tensors", "layers"])


@contextmanager
def opened(
    device: Device, path: Path, placement: Placement | None, stream_dir: Path | None = None
) -> Iterator[Weights]:
    """The weights of a file, placed so, all that is streamed in files if there is a folder."""
    with Gguf(path) as gguf:
        config = Config.of(gguf)
        if placement is not None:
            names = placement.on_host(config)
            assert names
            config = with_streaming(config, names, placement.expert_slots or 0)
            if stream_dir is not None:
                config = replace(config, streaming=replace(config.streaming, in_files=names))
        with Weights.load(gguf, config, device, stream_dir) as weights:
            weights.streamed.clear()  # plans rely on nothing that loading has left there
            yield weights


def results(device: Device, weights: Weights, whole: bool) -> list[Any]:
    """A greedy answer and logits of decode steps; with ``whole`` also those of a prompt, and tokens
    of three sequences that are in one step."""
    settings = SessionSettings(context=64, sequences=3, page_len=16)
    vocab = weights.config.vocab_size
    tokens = tokens_of(vocab)
    with Session(device, weights, settings) as session:
        found = of_session(session, vocab, whole)
    if whole:
        with stepping(device, weights, settings) as eager:
            for sequence in range(3):
                eager.feed(tokens[sequence : sequence + 5], sequence)
            found.append([eager.step() for _ in range(3)])
    return found


def of_session(session: Session, vocab: int, whole: bool = False) -> list[Any]:
    """A greedy answer, and logits of decode steps; with ``whole`` those of a prompt."""
    tokens = tokens_of(vocab)
    found: list[Any] = [answer(session, tokens[:9], 7 if whole else 4)]
    found.append(logits_of_each(session, tokens[: 4 if whole else 2]))
    if whole:
        found.append(logits_of(session, tokens))
    return found


def tokens_of(vocab: int) -> list[int]:
    """Tokens of a prompt."""
    return [(number * 7 + 3) % vocab for number in range(24)]


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """That results are equal, bit for bit."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_mixtures_with_caches_of_one_two_and_all_experts(
    name: str,
    device: Device,
    reference_file: Callable[[str], Path],
    pytestconfig: pytest.Config,
) -> None:
    whole = not device.is_emulated or pytestconfig.getoption("--full")
    path, copies = reference_file(name), {}
    with opened(device, path, None) as weights:
        expected = results(device, weights, whole)
        mixtures = [of for layer in weights.config.layers for of in layer.mixtures]
        most = len(mixtures)
    for slots in (1, 2, 99) if whole else (2,):
        with opened(device, path, replace(EXPERTS, expert_slots=slots)) as weights:
            same(results(device, weights, whole), expected)
            caches = weights.expert_caches.values()
            copies[slots] = [cache.statistics()[1] for cache in caches]
            assert len(copies[slots]) == most
    assert any(copies[2])
    if whole:  # with room for all, loading has filled it
        assert not any(copies[99])
        assert any(copies[1])


def test_every_golden_mixture_is_run_with_caches(
    reference_file: Callable[[str], Path],
) -> None:
    names = {path.name.partition(".")[0] for path in (DATA / "families").glob("*.gguf.xz")}
    found = set()
    for name in names:
        with Gguf(reference_file(name)) as gguf:
            if any(layer.mixtures for layer in Config.of(gguf).layers):
                found.add(name)
    assert found == {*SAMPLE, *MIXTURES}


def test_experts_that_are_chosen_by_parts_of_logits() -> None:
    """Those of a router that the product before it computes: the parts are added up in the same
    order, with slots for less than a row's experts, which are placed first, for these, and for all:
    products look them up."""
    keys = {**SHAPES["gpt-oss-20b"].keys, "expert_feed_forward_length": 96, "context_length": 64}
    sizes = {"layers": 2, "hidden": 64, "heads": 16, "kv_heads": 2, "ffn": 128, "vocab": 256}
    shape = replace(SHAPES["gpt-oss-20b"], keys=keys, **sizes)
    found = []
    for slots in (None, 3, 4, 32):
        placement = None if slots is None else replace(EXPERTS, expert_slots=slots)
        model = SyntheticModel("tiny", shape=shape)
        with Engine.open(
            model, device="emulator", context=32, cache_folder=None, placement=placement
        ) as engine:
            plan = engine.session.steps.bound(StepShape(1, 32, Output.GREEDY)).plan
            labels = [operation.label for operation in plan]
            assert not any(label.endswith("ffn_gate_inp") for label in labels)
            assert any(label.endswith(".place") for label in labels) == (slots == 3)
            assert ("settle" in labels) == (slots in (4, 32))
            found.append(of_session(engine.session, 256))
    for other in found[1:]:
        same(other, found[0])


@pytest.mark.parametrize("name", ["dots1-moe", pytest.param("llama4-moe", marks=pytest.mark.full)])
def test_rows_that_choose_more_than_a_cache_holds_gather_what_they_choose(
    name: str, device: Device, reference_file: Callable[[str], Path]
) -> None:
    """And nothing else: of the others the slot of the matrix has zeros."""
    settings, found = SessionSettings(context=32, sequences=2), []
    for placement in (None, replace(EXPERTS, expert_slots=1)):
        with (
            opened(device, reference_file(name), placement) as weights,
            stepping(device, weights, settings) as eager,
        ):
            vocab = weights.config.vocab_size
            for sequence in range(2):
                eager.feed(tokens_of(vocab)[sequence : sequence + 1], sequence)
            found.append([eager.step((0, 1)) for _ in range(3)])
            plan = eager.session.steps.bound(StepShape(2, 32, Output.GREEDY)).plan
    assert found[0] == found[1]
    gathers = [op for op in plan if op.label.endswith(".gather")]
    assert len(gathers) == sum(len(layer.mixtures) for layer in weights.config.layers)
    assert all(is_transfer(op) for op in gathers)
    assert not any(op.label.startswith("transfer") for op in plan)


@pytest.mark.parametrize(
    "placement",
    [
        Placement(gpu_layers=0),
        Placement(overrides=((r"blk\.0\.attn_[qo]", True), ("down", True))),
    ],
    ids=["all layers", "some tensors"],
)
def test_layers(placement: Placement, device: Device, expected: list[Any]) -> None:
    with opened(device, NANO, placement) as weights:
        same(results(device, weights, False), expected)


@pytest.mark.parametrize(
    ("split", "name"),
    [
        ("layers", "nano"),
        ("tensors", "gpt-oss-moe"),
        pytest.param("tensors", "nano", marks=pytest.mark.full),
        pytest.param("layers", "qwen3moe-moe", marks=pytest.mark.full),
    ],
)
def test_several_devices(
    split: Any,
    name: str,
    device_name: str,
    needs_gpus: Callable[[int], None],
    reference_file: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each streams its layers and caches its experts, and answers are those without."""
    needs_gpus(2)
    held: list[Weights] = []
    upload = Weights.upload
    monkeypatch.setattr(Weights, "upload", lambda self, *of: (held.append(self), upload(self, *of)))
    path = NANO if name == "nano" else reference_file(name)
    wanted: dict[str, Any] = {"device": device_name, "gpus": 2, "split": split, "context": 64}
    found: list[list[Any]] = []
    for placement in (None, ALL_CACHED):
        with Engine.open(path, placement=placement, cache_folder=None, **wanted) as engine:
            found.append(of_session(engine.session, engine.config.vocab_size))
            caches = [cache for of in held for cache in of.expert_caches.values()]
            assert all(cache.statistics()[1] for cache in caches)
    assert [bool(of.streamed) for of in held] == [False, False, True, True]
    assert bool(caches) == (name != "nano")
    same(found[1], found[0])


@pytest.fixture(scope="module")
def expected(device: Device) -> list[Any]:
    """What a small model answers with all of it on the device."""
    with opened(device, NANO, None) as weights:
        return results(device, weights, False)


def test_the_plan_has_transfers_beside_kernels(device: Device) -> None:
    """Each matrix is copied once a step, and nothing else changes."""
    shape = StepShape(1, 32, Output.GREEDY)
    plans = []
    for placement in (None, Placement(gpu_layers=0)):
        with (
            opened(device, NANO, placement) as weights,
            Session(device, weights, SessionSettings(context=32)) as session,
        ):
            plans.append([*session.steps.bound(shape).plan])
            streamed = len(weights.streamed)
    whole, plan = plans
    transfers = [operation for operation in plan if is_transfer(operation)]
    assert len(transfers) == streamed > 10
    kept = [op.label for op in plan if not is_transfer(op)]
    assert kept == [op.label for op in whole]


# ---- layers in files ----------------------------------------------------------------------------


def files_in(folder: Path) -> list[str]:
    """The names of its files, and when they were written."""
    return sorted(f"{of.name} {of.stat().st_mtime_ns}" for of in folder.iterdir())


@pytest.mark.parametrize("name", ["gpt-oss-moe", pytest.param("nano", marks=pytest.mark.full)])
def test_layers_in_files(
    name: str,
    device_name: str,
    tmp_path: Path,
    reference_file: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them, or one; written once, and read by steps of prompts and of tokens."""
    path = NANO if name == "nano" else reference_file(name)
    wanted: dict[str, Any] = {"device": device_name, "context": 64, "cache_folder": None}
    wanted |= {"stream_dir": tmp_path / "layers", "placement": ALL_CACHED}
    monkeypatch.setattr(placing, "READER_BYTES", 0)
    found: list[list[Any]] = []
    written, counts = [], []
    for room in (None, 0, 600_000):
        with Engine.open(path, host_memory=room, **wanted) as engine:
            found.append(of_session(engine.session, engine.config.vocab_size))
            counts.append(len(engine.weights.streamed.in_files))
            caches = engine.weights.expert_caches.values()
            assert all(cache.statistics()[1] for cache in caches)
            assert all((cache.reader is None) == (room is None) for cache in [*caches][:1])
        if room is not None:
            written.append(files_in(tmp_path / "layers"))
    for other in found[1:]:
        same(other, found[0])
    assert len(written[0]) == 2
    assert written[1] == written[0]
    every = len(engine.weights.streamed)
    assert counts == [0, every, every // 2]


def test_row_scales_of_matrices_that_are_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts multiply them as bytes: their scales stay on the device, also of earlier files."""
    monkeypatch.setattr("urdir.ptxgen.kernels.linear.bytes_choice.LEAST_ROWS", 9)
    wanted: dict[str, Any] = {"device": "emulator", "context": 32, "cache_folder": None}
    wanted |= {"prompt_arithmetic": "int8", "placement": Placement(gpu_layers=0)}
    found = []
    for _ in ("written", "there"):
        with Engine.open(NANO, host_memory=0, stream_dir=tmp_path, **wanted) as engine:
            assert engine.config.as_bytes
            found.append(logits_of(engine.session, tokens_of(256)[:16]))
    same(found[1:], found[:1])


def test_files_of_a_model_that_has_changed(device: Device, tmp_path: Path) -> None:
    """In one byte in the middle of a matrix: its layers are written again, with that byte."""
    path, folder = tmp_path / NANO.name, tmp_path / "layers"
    path.write_bytes(NANO.read_bytes())
    name = "blk.1.ffn_down.weight"
    with Gguf(path) as gguf:
        begin = gguf.tensors[name].offset
    values = []
    for number in range(2):
        with opened(device, path, Placement(gpu_layers=0), folder) as weights:
            of = next(of for of in weights.streamed if of.name == name)
            weights.streamed.restore([of])
            values.append(weights.streamed[of].download(np.uint8))
        assert len(files_in(folder)) == 2 + 2 * number
        data = bytearray(path.read_bytes())
        data[begin + 5000] ^= 1
        path.write_bytes(data)
    assert 0 < np.count_nonzero(values[0] != values[1]) < 9


def test_gpus_that_work_together_read_no_files(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"device": "emulator", "context": 64, "gpus": 2, "host_memory": 0}
    wanted |= {"placement": Placement(gpu_layers=0), "stream_dir": tmp_path}
    with pytest.raises(UnsupportedError, match=r"2 GPUs with parts of .* split the model by lay"):
        Engine.open(NANO, **wanted)


@pytest.mark.full
def test_layers_in_files_of_several_devices(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"device": "emulator", "context": 64, "gpus": 2, "host_memory": 0}
    wanted |= {"placement": Placement(gpu_layers=0), "stream_dir": tmp_path}
    answers = []
    for changed in ({}, {"host_memory": None, "stream_dir": None}):
        with Engine.open(NANO, split="layers", **wanted | changed) as engine:
            answers.append(answer(engine.session, tokens_of(256)[:9], 3))
    assert answers[0] == answers[1]
    assert len(files_in(tmp_path)) == 2


def test_a_folder_without_room_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed.shutil, "disk_usage", lambda _: SimpleNamespace(free=12_345))
    wanted: dict[str, Any] = {"placement": Placement(gpu_layers=0), "host_memory": 0}
    with pytest.raises(ModelError, match=r"not enough room in .*: 8\d\d,\d{3} bytes .* 12,345 are"):
        Engine.open(NANO, device="emulator", context=64, stream_dir=tmp_path, **wanted)
    assert not files_in(tmp_path)


def test_a_file_that_changes_ends_the_answer(tmp_path: Path) -> None:
    """The step fails, and all later ones."""
    wanted: dict[str, Any] = {"placement": Placement(gpu_layers=0), "host_memory": 0}
    with Engine.open(NANO, device="emulator", context=64, stream_dir=tmp_path, **wanted) as engine:
        answer(engine.session, [3, 5], 2)
        for path in tmp_path.iterdir():
            path.write_bytes(b"nothing")
        for words in ("was changed while", "could not be read before"):
            with pytest.raises(DeviceLostError, match=f"open the model again: .*{words}"):
                answer(engine.session, [3, 5, 7], 3)


# ---- what stays on the device -----------------------------------------------------------------


@pytest.fixture(scope="module")
def config(demo_file: Path) -> Iterator[Config]:
    with Gguf(demo_file) as gguf:
        yield Config.of(gguf)


def layers_of(names: frozenset[str]) -> set[int]:
    """The layers of some tensors."""
    return {int(name.split(".")[1]) for name in names}


@pytest.mark.parametrize(("given", "first"), [(7, 0), (6, 1), (1, 6), (0, 6), (99, 0)])
def test_the_last_layers_stay_and_the_output_counts(config: Config, given: int, first: int) -> None:
    names = Placement(gpu_layers=given).on_host(config)
    assert layers_of(names) == set(range(first))
    assert names <= streamable(config)
    assert not any("norm" in name for name in names)


def test_the_first_pattern_decides(config: Config) -> None:
    placement = Placement(overrides=((r"blk\.1\..*", False), ("ffn_down", True)), gpu_layers=5)
    names = placement.on_host(config)
    assert layers_of(names) == {0, 2, 3, 4, 5}
    assert {name for name in names if not name.startswith("blk.0.")} == {
        f"blk.{layer}.ffn_down.weight" for layer in (2, 3, 4, 5)
    }


def test_experts_of_the_first_layers(reference_file: Callable[[str], Path]) -> None:
    with Gguf(reference_file("qwen3moe-moe")) as gguf:
        config = Config.of(gguf)
    names = Placement(host_experts=1).on_host(config)
    assert names == {f"blk.0.ffn_{kind}_exps.weight" for kind in ("up", "gate", "down")}
    assert not Placement(host_experts=0).on_host(config)


def test_a_table_of_which_a_layer_reads_rows_stays(reference_file: Callable[[str], Path]) -> None:
    """It would be copied whole for them."""
    with Gguf(reference_file("qwen4exp")) as gguf:
        config = Config.of(gguf)
    names = Placement(gpu_layers=0).on_host(config)
    assert "blk.0.ple_key.weight" in names
    assert "per_layer_token_embd.weight" not in names
    with pytest.raises(SettingsError, match="only matrices of layers"):
        Placement(overrides=(("per_layer_token", True),)).on_host(config)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("token_embd", "only matrices of layers"),
        ("attn_norm", "only matrices of layers"),
        ("nothing", "no such tensor"),
        ("(", "unterminated"),
    ],
)
def test_patterns_that_are_refused(config: Config, pattern: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Placement(overrides=((pattern, True),)).on_host(config)


def test_as_much_is_streamed_as_does_not_fit(demo_file: Path, device: Device) -> None:
    with Gguf(demo_file) as gguf:
        ranks = Ranks(gguf, [device])
        config = Config.of(gguf)
        whole = sum(weight_sizes(gguf, config).values())
        counts = []
        for room in (whole, 0.8 * whole, 0.5 * whole, 0):
            names = fitting_names(ranks, config, frozenset(), [room])
            counts.append(len(layers_of(names)))
            rest = sum(weight_sizes(gguf, with_streaming(config, names)).values())
            assert rest <= room or len(layers_of(names)) == config.n_layers
        names = fitting_names(ranks, config, frozenset(), [0.8 * whole])
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == config.n_layers
    assert layers_of(names) != set(range(counts[1]))  # evenly


def test_layers_that_are_no_more_than_slots_stay(
    device: Device, reference_file: Callable[[str], Path]
) -> None:
    """The two layers of a model differ: two slots for the larger one would take more."""
    with Gguf(reference_file("rwkv7-dense")) as gguf:
        ranks, config = Ranks(gguf, [device]), Config.of(gguf)
        assert not fitting_names(ranks, config, frozenset(), [0])


def test_experts_of_all_layers_are_streamed_and_cached(device: Device) -> None:
    """Of a model with 48 layers, even where those of a few would do: a token uses few of each.
    Fewer layers where the host's memory ends; more than experts where caches do not fit."""
    with SyntheticModel("qwen3-30b-a3b") as file:
        config, ranks = Config.of(file), Ranks(file, [device])
        whole = sum(weight_sizes(file, config).values())
        least = with_streaming(config, EXPERTS.on_host(config), 8)
        lowest = sum(weight_sizes(file, least).values())
        every = streamed_nbytes(file, least)
        assert lowest < 0.2 * whole

        def layers(room: float, host: int | None = None) -> tuple[int, bool]:
            names = fitting_names(ranks, config, frozenset(), [room], host=host)
            return len(layers_of(names)), all("_exps" in name for name in names)

        assert layers(whole) == (0, True)
        assert layers(0.9 * whole) == (48, True)
        assert layers(lowest) == (48, True)
        assert layers(lowest - 1000) == (48, False)
        assert layers(0.9 * whole, every) == (48, True)
        assert layers(0.9 * whole, every - 1) == (47, True)
        assert layers(0.5 * whole, every // 10)[0] >= 24  # what the device needs comes first


# ---- refusals, and faults -----------------------------------------------------------------------


def test_too_little_host_memory_is_refused_with_the_numbers(
    demo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "host_available", lambda: (1 << 30) + 5000)
    with pytest.raises(
        ModelError, match=r"not enough host memory: 2,\d{3},\d{3} bytes .* 5,000 are"
    ):
        Engine.open(demo_file, device="emulator", placement=Placement(gpu_layers=0))


def test_what_the_host_has_left(tmp_path: Path) -> None:
    assert streamed.host_available(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   7 kB\n")
    assert streamed.host_available(tmp_path) == 7168
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1500\n")
    (group / "memory.stat").write_text("anon 7\ninactive_file 300\nactive_file 200\nshmem 4\n")
    for most, left in (("max", 7168), ("5000", 4000), ("900", 0)):
        (group / "memory.max").write_text(f"{most}\n")
        assert streamed.host_available(tmp_path) == left


def test_embeddings_have_no_weights_in_host_memory(demo_file: Path) -> None:
    with pytest.raises(UnsupportedError, match="embeddings with"):
        Engine.open(
            demo_file, device="emulator", placement=Placement(gpu_layers=0), embeddings=True
        )


@each_split
def test_what_is_streamed_fits_each_of_several_gpus(split: Any, demo_file: Path) -> None:
    with Group.open("emulator", 2) as group, Gguf(demo_file) as gguf:
        config, settings = Config.of(gguf), SessionSettings(context=64, chunk=64)
        needed = [
            Place(gguf, share, device).plan(settings).total + RESERVE_BYTES
            for share, device in zip(shares_of(config, gguf, 2, split), group, strict=True)
        ]
    wanted: dict[str, Any] = {"device": "emulator", "gpus": 2, "split": split}
    wanted |= {"context": 64, "chunk": 64, "device_memory": max(needed)}
    with Engine.open(demo_file, placement=Placement(fit=True), **wanted) as engine:
        assert not engine.weights.streamed
    wanted["device_memory"] -= 100_000
    with Engine.open(demo_file, placement=Placement(fit=True), **wanted) as engine:
        streaming = engine.config.streaming
        assert streaming is not None
        assert len(layers_of(streaming.names)) < engine.config.n_layers
        assert all(device.usable_memory() > 0 for device in engine.group)


def test_room_is_left_for_a_draft_model(reference_file: Callable[[str], Path]) -> None:
    path, draft = reference_file("target-any"), reference_file("eagle3-d2t.draft")
    wanted: dict[str, Any] = {"device": "emulator", "context": 64, "chunk": 64, "draft": draft}
    with pytest.raises(ModelError, match="bytes needed") as caught:
        Engine.open(path, device_memory=RESERVE_BYTES, **wanted)
    found = re.search(r"([0-9,]+) bytes needed", str(caught.value))
    assert found is not None
    limit = int(found[1].replace(",", "")) - 1000
    with Engine.open(path, device_memory=limit, placement=Placement(fit=True), **wanted) as engine:
        assert engine.weights.streamed


@pytest.mark.parametrize("kind", ["allocation", "host_allocation"])
def test_an_allocation_that_fails_frees_the_rest(kind: str) -> None:
    api = bindings.emulated(total_memory=256 << 20)
    with Device.open("emulator", api=api) as device, Gguf(NANO) as gguf:
        free = device.memory_info()[0]
        config = with_streaming(Config.of(gguf), Placement(gpu_layers=0).on_host(Config.of(gguf)))
        for nth in (1, 2):
            api.inject(kind, nth=nth)
            with pytest.raises(OutOfMemoryError):
                Weights.load(gguf, config, device)
            assert device.memory_info()[0] == free


def test_a_limit_of_device_memory(expected: list[Any]) -> None:
    """What is used stays below it, and the answer is the same."""
    session = SessionSettings(context=64, chunk=64)
    with Device.open("emulator") as device, Gguf(NANO) as gguf:
        needed = Place(gguf, Config.of(gguf), device).plan(session).total + RESERVE_BYTES
    wanted: dict[str, Any] = {"device": "emulator", "context": 64, "chunk": 64}
    with pytest.raises(ModelError, match=r"200,000,000 available.*streamed weights"):
        Engine.open(NANO, device_memory=200_000_000, **wanted)
    for limit, is_streamed in ((needed, False), (needed - 50_000, True)):
        placement = Placement(fit=True)
        with Engine.open(NANO, device_memory=limit, placement=placement, **wanted) as engine:
            assert bool(engine.weights.streamed) == is_streamed
            tokens = [(number * 7 + 3) % engine.config.vocab_size for number in range(9)]
            assert answer(engine.session, tokens, 4) == expected[0]
            assert engine.device.usable_memory() > 0


@pytest.mark.parametrize(
    "function",
    [
        "cuMemHostAlloc",
        "cuMemcpyDtoHAsync",
        "cuMemcpyDtoD",
        "cuGraphAddMemcpyNode",
        "cuMemFreeHost",
    ],
)
def test_a_call_that_fails_leaves_nothing_behind(
    function: str, reference_file: Callable[[str], Path]
) -> None:
    """While loading, recording or closing."""
    api, path = bindings.emulated(), reference_file("gpt-oss-moe")

    def use() -> None:
        with (
            Device.open("emulator", api=api) as device,
            opened(device, path, ALL_CACHED) as weights,
            Session(device, weights, SessionSettings(context=32)) as session,
        ):
            session.steps.graph(StepShape(1, 32, Output.GREEDY))
            session.steps.graph(StepShape(8, 32, Output.GREEDY, prompt=8))

    api.inject(function)
    with pytest.raises(DriverError):
        use()
    use()
    assert api.live() == {}


def test_caches_begin_with_the_experts_that_were_chosen_most(
    tmp_path: Path, reference_file: Callable[[str], Path]
) -> None:
    path, folder = reference_file("gpt-oss-moe"), tmp_path / "cache"
    wanted: dict[str, Any] = {"device": "emulator", "context": 32, "placement": CACHED}
    answers, held = [], []
    for _ in range(2):
        with Engine.open(path, cache_folder=folder, **wanted) as engine:
            caches = [*engine.weights.expert_caches.values()]
            held.append([set(cached(cache)) for cache in caches])
            answers.append(answer(engine.session, [3, 5, 7], 6))
            counts = [cache.counts() for cache in caches]
    assert answers[0] == answers[1]
    assert held[0] == [{0, 1}, {0, 1}]
    (saved,) = (folder / "experts").iterdir()
    total = np.frombuffer(saved.read_bytes(), np.float32)
    first = (total - np.concatenate(counts)) / 0.5
    np.testing.assert_array_equal(first, np.concatenate(counts))  # the same answer twice
    for experts, of in zip(held[1], np.split(first, 2), strict=True):
        others = [of[expert] for expert in range(len(of)) if expert not in experts]
        assert min(of[[*experts]]) >= max(others)
    saved.write_bytes(b"abc")  # is ignored
    with Engine.open(path, cache_folder=folder, **wanted) as engine:
        caches = [*engine.weights.expert_caches.values()]
        assert [set(cached(cache)) for cache in caches] == held[0]


def test_a_load_that_ends_early_counts_no_experts(
    tmp_path: Path, reference_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload(weights: Weights, *_: Any) -> None:
        raise ModelError("the file is gone")

    monkeypatch.setattr(Weights, "upload", upload)
    with pytest.raises(ModelError, match="is gone"):
        Engine.open(
            reference_file("gpt-oss-moe"),
            device="emulator",
            context=32,
            placement=CACHED,
            cache_folder=tmp_path,
        )
    assert not [*(tmp_path / "experts").iterdir()]


def cached(cache: ExpertCache) -> list[int]:
    """The experts in the slots of a cache."""
    state = cache.state.download(np.uint32)
    return (parts_of(state, cache.experts, cache.slots)[1] - 1).tolist()


def test_many_users_of_a_service(reference_file: Callable[[str], Path]) -> None:
    """Memory is divided among experts and pages; answers are those of an engine with all of it."""
    answers = []
    for placement, limit in ((None, None), (replace(CACHED, fit=True), 400 << 20)):
        with Engine.open(
            reference_file("gpt-oss-moe"),
            device="emulator",
            context=64,
            sequences=2,
            memory_share=0.9,
            placement=placement,
            device_memory=limit,
        ) as engine:
            answers.append([answer(engine.session, [3, 5, 7], 4) for _ in range(2)])
    assert answers[1] == answers[0]
