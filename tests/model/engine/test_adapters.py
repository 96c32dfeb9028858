"""LoRA adapters: logits against float64 with merged weights, by row, by request and by file."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.adapter_files import Matrices, made, unpacked, write_gguf, write_peft
from tests.model.files.quantised_folders import gptq, of_input, quantised
from urdir.driver.operation import Launch
from urdir.model.engine import budget
from urdir.model.engine.adapters import Adapters
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.logits import logits_after
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.step import build_plan
from urdir.model.errors import BusyError, ModelError, SettingsError
from urdir.model.families.config import Config
from urdir.model.families.placement import Placement
from urdir.model.files.gguf import Gguf
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.lower import adapters as lower_adapters
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.linear.epilogue import self_adapted

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama."""
    return unpacked("llama-dense", tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def merged(base: Path, reference_model: Any) -> Any:
    """Logits in float64 of the model with some adapters merged into its weights."""

    def logits(tokens: list[int], *adapters: tuple[Matrices, float], path: Path = base) -> Any:
        with Gguf(path) as file:
            reference = reference_model(file, Config.of(file), 64)
            plain = reference._tensor

            def tensor(name: str) -> Any:
                values = plain(name)
                for matrices, scale in adapters:
                    if name in matrices:
                        a, b = (of.astype(np.float64) for of in matrices[name])
                        values = values + scale * (b @ a).reshape(values.shape)
                return values

            reference.tensor = tensor
            return reference.logits(tokens)

    return logits


@pytest.fixture(scope="module")
def two(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two adapters, of other tensors and other ranks: their files and matrices."""
    folder = tmp_path_factory.mktemp("two")
    first = made(base, 1, 5, "attn_q", "attn_v", "ffn_", "output.weight")
    second = made(base, 2, 8, "attn_k", "attn_output", "ffn_down")
    files = write_gguf(folder / "first.gguf", first), write_gguf(folder / "second.gguf", second)
    return files, (first, second)


@pytest.fixture(scope="module")
def engine(base: Path, two: Any, device_name: str) -> Iterator[Engine]:
    with Engine.open(
        base,
        device=device_name,
        context=48,
        kv_dtype="f32",
        exact=True,
        sequences=4,
        page_len=16,
        adapters=[(file, 1.0) for file in two[0]],
        max_adapters=3,
        max_adapter_rank=13,
    ) as opened:
        assert opened.session.adapters is not None
        opened.session.adapters.default = ()
        yield opened


#: alpha / rank of both.
SCALES = 2 / 5, 2 / 8


def test_rows_of_one_step_have_adapters_of_their_own(engine: Engine, two: Any, merged: Any) -> None:
    first, second = two[1]
    of_rows: list[tuple[tuple[str, float], ...]] = [
        (),
        (("first", 1.0),),
        (("second", -0.5),),
        (("first", 0.5), ("second", 1.0)),
    ]
    adapters, state = engine.session.adapters, engine.session.parts.state
    assert adapters is not None
    with EagerSteps(engine.session) as eager:
        places = [adapters.take(adapters.chosen(choice)) for choice in of_rows]
        assert len({place.slot for place in places}) == 4
        with pytest.raises(BusyError, match="3 slots"):
            adapters.take(adapters.chosen((("first", 0.25), ("second", 1.0))))
        for sequence, place in enumerate(places):
            state.write_adapter(sequence, *place)
            eager.feed(TOKENS[: 3 + sequence], sequence)
            eager.logits([sequence])
            eager.feed([TOKENS[-1]], sequence)
        logits = eager.logits(range(4))
        for place in places:
            adapters.give_back(place)
    for sequence, (row, choice) in enumerate(zip(logits, of_rows, strict=True)):
        known = {"first": (first, SCALES[0]), "second": (second, SCALES[1])}
        pairs = [(known[name][0], known[name][1] * scale) for name, scale in choice]
        wanted = merged([*TOKENS[: 3 + sequence], TOKENS[-1]], *pairs)[-1]
        assert relative_rms(row, wanted) < 2e-6, sequence


@pytest.mark.full
def test_log_probabilities_of_prompts_with_adapters_of_their_own(
    base: Path, two: Any, merged: Any, device_name: str
) -> None:
    """One of them is of the output matrix; prompts share steps."""
    known = {"first": (two[1][0], SCALES[0]), "second": (two[1][1], SCALES[1])}
    choices: tuple[tuple[tuple[str, float], ...], ...]
    choices = (("first", 1.0),), (), (("second", -0.5),)
    given = [(file, 1.0) for file in two[0]]
    with Engine.open(
        base, device=device_name, context=32, sequences=3, adapters=given, max_adapter_rank=8
    ) as opened:
        limits = Limits.for_throughput(opened.session.shapes, 3)
        with AnswerLoop(opened.session, None, limits) as loop:
            for choice in choices:
                asked = {"settings": GREEDY, "limit": 0, "adapters": choice, "prompt_logprobs": 0}
                loop.add(loop.answer_to(Request(prompt=tuple(TOKENS), **asked)))
            found: list[Any] = []
            while not loop.is_idle:
                loop.turn()
                found += [items[0] for items in loop.take_items().values()]
    for (scores,), choice in zip([piece.scores for piece in found], choices, strict=True):
        pairs = [(known[name][0], known[name][1] * scale) for name, scale in choice]
        logits = merged(TOKENS, *pairs)[:-1]
        own = logits[np.arange(len(logits)), TOKENS[1:]] - np.logaddexp.reduce(logits, axis=1)
        assert np.sqrt(np.mean((scores.values[:, 0] - own) ** 2)) < 3e-3 * logits.std()


@pytest.mark.turns(3, which=(1, 2))
@pytest.mark.parametrize(
    ("tokens", "exact", "shrink"),
    [
        (3, False, "lora_shrink"),
        (12, False, "lora_shrink_packed"),
        (12, True, "lora_shrink_rows"),
    ],
)
def test_prompts_and_rounded_activations(
    base: Path,
    two: Any,
    merged: Any,
    device_name: str,
    tokens: int,
    exact: bool,
    shrink: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few rows and many; the products of many take packed activations, and so does A x."""
    monkeypatch.setattr(lower_adapters, "LEAST_ROWS", 8 if exact else 16)  # of `LoraShrinkRows`
    monkeypatch.setattr(budget, "_measured", {})  # by other values of it
    wanted = merged(TOKENS[:tokens], *zip(two[1], SCALES, strict=True))[-1]
    given = [(file, 1.0) for file in two[0]]
    with (
        Engine.open(
            base, device=device_name, context=16, adapters=given, max_adapter_rank=8
        ) as opened,
        pytest.raises(ModelError, match="rank 13 together"),
    ):
        [*logits_after(opened.session, TOKENS[:tokens])]
    with Engine.open(base, device=device_name, context=16, adapters=given, exact=exact) as opened:
        rows = opened.session.shapes.chunks[0 if tokens < 8 else -1]
        step = StepShape(rows, 256, Output.SAMPLE, prompt=rows)
        kernels = {kernel.name for kernel in build_plan(opened.session.parts, step).kernels()}
        assert {name for name in kernels if name.startswith("lora")} == {shrink, "lora_shrink"}
        (found,) = logits_after(opened.session, TOKENS[:tokens])
    assert relative_rms(found, wanted) < 3e-3


def test_many_sequences_with_adapters_of_their_own(
    base: Path, two: Any, merged: Any, device_name: str
) -> None:
    """Steps of twelve rows, one after the other, whose products compute A x themselves."""
    choices: tuple[tuple[tuple[str, float], ...], ...]
    choices = (), (("first", 1.0),), (("second", -0.5),)
    with Engine.open(
        base,
        device=device_name,
        context=32,
        sequences=12,
        adapters=[(file, 1.0) for file in two[0]],
        max_adapters=3,
        max_adapter_rank=16,
    ) as opened:
        adapters, session = opened.session.adapters, opened.session
        assert adapters is not None
        plan = build_plan(session.parts, StepShape(12, 256, Output.LOGITS))
        assert any("lora_words" in op.args for op in plan if isinstance(op, Launch))
        with EagerSteps(session) as eager:
            places = [adapters.take(adapters.chosen(choice)) for choice in choices]
            for sequence in range(12):
                session.parts.state.write_adapter(sequence, *places[sequence % 3])
                eager.feed(TOKENS[: 2 + sequence // 3], sequence)
            for step in range(3):
                logits = eager.logits(range(12))
                for sequence in range(12):
                    eager.feed([TOKENS[-1 - step]], sequence)
            for place in places:
                adapters.give_back(place)
    known = {"first": (two[1][0], SCALES[0]), "second": (two[1][1], SCALES[1])}
    for sequence, row in enumerate(logits):
        choice = choices[sequence % 3]
        pairs = [(known[name][0], known[name][1] * scale) for name, scale in choice]
        tokens = [*TOKENS[: 2 + sequence // 3], TOKENS[-1], TOKENS[-2]]
        assert relative_rms(row, merged(tokens, *pairs)[-1]) < 3e-3, sequence


@pytest.mark.parametrize("most", [64, 0])
def test_products_that_compute_a_x_themselves(
    base: Path,
    two: Any,
    merged: Any,
    device_name: str,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """One row: token after token, two sequences in turn, one without an adapter; launches of their
    own for A x if CTAs may compute ``most`` ranks."""
    monkeypatch.setattr(self_adapted, "MOST_EACH", most)
    monkeypatch.setattr(budget, "_measured", {})  # by other values of it
    lower_adapters._with_own.cache_clear()
    with Engine.open(
        base,
        device=device_name,
        context=16,
        sequences=2,
        adapters=[(two[0][0], 1.0)],
        max_adapter_rank=8,
    ) as opened:
        plan = build_plan(opened.session.parts, StepShape(1, 16, Output.LOGITS))
        assert ("lora_shrink" in {kernel.name for kernel in plan.kernels()}) == (most == 0)
        adapters, state = opened.session.adapters, opened.session.parts.state
        assert adapters is not None
        with EagerSteps(opened.session) as eager:
            place = adapters.take(adapters.chosen((("first", 0.5),)))
            state.write_adapter(0, *place)
            state.write_adapter(1, 0, 1.0)
            found: dict[int, list[Any]] = {0: [], 1: []}
            for token in TOKENS[:4]:
                for sequence in found:
                    eager.feed([token], sequence)
                    found[sequence] += [*eager.logits([sequence])]
            adapters.give_back(place)
    lower_adapters._with_own.cache_clear()
    pair = two[1][0], 0.5 * SCALES[0]
    for sequence, of in ((0, [pair]), (1, [])):
        wanted = merged(TOKENS[:4], *of)
        assert relative_rms(np.array(found[sequence]), wanted) < 3e-3


@pytest.mark.turns(4, which=(2, 3))
@pytest.mark.parametrize(
    ("exact", "tokens", "slots"),
    [(True, 2, None), (False, 2, None), (False, 12, None), (True, 2, 2)],
)
def test_experts_and_routers(
    tmp_path: Path, merged: Any, device_name: str, exact: bool, tokens: int, slots: int | None
) -> None:
    """One row, few, and many, which are grouped by expert; experts in host memory, ``slots`` of
    each layer cached."""
    path = unpacked("llama-moe", tmp_path)
    matrices = made(path, 4, 4, "attn_v", "_exps.weight", "ffn_gate_inp")
    file = write_gguf(tmp_path / "experts.gguf", matrices, alpha=2.0)
    wanted = merged(TOKENS[: tokens + 1], (matrices, 2 / 4), path=path)[-2:]
    with Engine.open(
        path,
        device=device_name,
        context=16,
        exact=exact,
        kv_dtype="f32",
        adapters=[(file, 1.0)],
        placement=None if slots is None else Placement(host_experts=99, expert_slots=slots),
    ) as opened:
        assert bool(opened.weights.expert_caches) == (slots is not None)
        given = TOKENS[:tokens], TOKENS[tokens : tokens + 1]
        found = np.stack(list(logits_after(opened.session, *given)))
    assert relative_rms(found, wanted) < (2e-6 if exact else 5e-3)


@pytest.mark.parametrize("tokens", [1, 12])
def test_experts_whose_first_matrices_have_orders(
    data: Path, tmp_path: Path, device_name: str, tokens: int
) -> None:
    """A is multiplied with x as it is. The last matrices have one group, and no order."""
    kind = gptq(4, 64, shuffled=True, each=True, seed=of_input)
    folders = quantised(data / "safetensors/qwen3moe-bf16", kind, tmp_path)
    random, matrices = np.random.default_rng(6), {}
    with SafetensorsModel(folders[0]) as model:
        assert "blk.1.ffn_gate_up_exps.order" in model.tensors
        for name in ("gate", "up", "down"):
            experts, rows, cols = model.tensors[f"blk.1.ffn_{name}_exps.weight"].shape
            a = random.standard_normal((experts, 4, cols), np.float32) / cols**0.5
            b = random.standard_normal((experts, rows, 4), np.float32)
            matrices[f"blk.1.ffn_{name}_exps.weight"] = a, b
    file, found = write_gguf(tmp_path / "a.gguf", matrices, arch="qwen3moe"), []
    for folder in folders:
        with Engine.open(
            folder,
            device=device_name,
            context=16,
            exact=True,
            kv_dtype="f32",
            adapters=[(file, 1.0)],
        ) as opened:
            found.append(np.stack(list(logits_after(opened.session, TOKENS[:tokens]))))
    assert relative_rms(*found) < 1e-5


def _tokens(engine: Engine, adapters: Any) -> tuple[list[int], int]:
    request = Request(prompt=tuple(TOKENS), settings=GREEDY, limit=4, adapters=adapters)
    generation = Generation(engine.session, None, request)
    for _ in generation.pieces():
        pass
    return generation.tokens, generation.statistics.cached_tokens


def test_prefixes_are_shared_by_requests_with_the_same_adapters_alone(engine: Engine) -> None:
    plain, _ = _tokens(engine, ())
    one, cached = _tokens(engine, (("first", 1.0),))
    assert cached == 0
    half, cached = _tokens(engine, (("first", 0.5),))
    assert cached == 0
    assert _tokens(engine, (("first", 1.0), ("second", 0.0))) == (one, 16)
    assert _tokens(engine, ())[0] == plain != one
    assert _tokens(engine, (("first", 0.5),)) == (half, 16)


def test_scopes_of_adapters_are_apart() -> None:
    """Also of names that differ in their last bytes alone."""
    scopes = [b"", b"a", b"a" * 64, b"a" * 65, b"a" * 64 + b"b"]
    choices = [(("1", 1.0),), (("1", 0.5),), (("1", 1.0), ("2", 1.0))]
    found = {Adapters.scope(scope, choice) for scope in scopes for choice in choices}
    assert len(found) == len(scopes) * len(choices)
    assert [Adapters.scope(scope, ()) for scope in scopes] == scopes


@pytest.mark.parametrize("scales", [[float("nan")], [float("-inf")], [1e39], [3e38, 3e38]])
def test_scales_that_the_device_does_not_take_are_refused(
    engine: Engine, scales: list[float]
) -> None:
    adapters = engine.session.adapters
    assert adapters is not None
    before = adapters.default
    with pytest.raises(SettingsError, match=r"adapter 'first' times .*: expected"):
        adapters.chosen([("first", scale) for scale in scales])
    if len(scales) == 1:
        with pytest.raises(SettingsError, match="adapter 'first' times"):
            adapters.set_scales({0: scales[0]})
        with pytest.raises(SettingsError, match="adapter 'first' times"):
            adapters.load_all([(adapters.names["first"], scales[0])])
    assert adapters.default == before


def test_adapters_come_and_go(engine: Engine, base: Path, tmp_path: Path, merged: Any) -> None:
    other = made(base, 7, 3, "attn_v")
    name = engine.load_adapter(write_gguf(tmp_path / "third.gguf", other))
    before, _ = _tokens(engine, ((name, 1.0),))
    engine.unload_adapter(name)
    with pytest.raises(SettingsError, match="no adapter 'third': first, second"):
        _tokens(engine, ((name, 1.0),))
    # what is cached of an adapter is not found by another one of that name
    engine.load_adapter(write_gguf(tmp_path / "other.gguf", made(base, 8, 3, "attn_v")), name)
    after, cached = _tokens(engine, ((name, 1.0),))
    assert cached == 0
    with pytest.raises(SettingsError, match="is loaded"):
        engine.load_adapter(tmp_path / "other.gguf", name)
    engine.unload_adapter(name)
    wanted = list(TOKENS)
    for _ in before:
        wanted.append(int(np.argmax(merged(wanted, (other, 2 / 3))[-1])))
    assert before == wanted[len(TOKENS) :] != after


def test_a_folder_of_adapters_is_read_as_they_are_named(
    base: Path, two: Any, tmp_path: Path, device_name: str
) -> None:
    """Five of a folder, two slots, two in host memory: each answer is that of its own adapter."""
    alone: dict[str, list[int]] = {}
    for number in range(5):
        matrices = made(base, 20 + number, 3, "attn_v", "ffn_down")
        write_gguf(tmp_path / f"a{number}.gguf", matrices)
    write_peft(tmp_path / "folder", made(base, 30, 4, "attn_q"))
    options: Any = {"device": device_name, "context": 48, "page_len": 16, "sequences": 2}
    names = [f"a{number}" for number in range(5)] + ["folder"]
    with Engine.open(base, max_adapters=1, max_adapter_rank=5, **options) as engine:
        for name in names:
            file = tmp_path / (f"{name}.gguf" if name != "folder" else name)
            engine.load_adapter(file, name)
            alone[name], _ = _tokens(engine, ((name, 1.0),))
    assert len({tuple(tokens) for tokens in alone.values()}) == 6
    with Engine.open(base, max_adapters=2, max_adapter_rank=5, adapter_folder=tmp_path,
                     max_host_adapters=2, **options) as engine:  # fmt: skip
        adapters = engine.session.adapters
        assert adapters is not None
        assert not adapters.names
        assert engine.adapters == tuple(names)
        for name in [*names, "a0", "a1", "a0", "folder"]:
            assert _tokens(engine, ((name, 1.0),))[0] == alone[name], name
            assert len(adapters.names) <= 2
        reads: list[Path] = []
        read = adapters.pool.read  # type: ignore[union-attr]
        object.__setattr__(adapters.pool, "read", lambda path: reads.append(path) or read(path))
        assert _tokens(engine, (("a0", 0.5),))[0] != alone["a0"]  # in a slot: for any scale
        assert reads == []
        write_gguf(tmp_path / "a3.gguf", made(base, 99, 2, "attn_v"))  # another file of that name
        assert _tokens(engine, (("a3", 1.0),))[0] != alone["a3"]
        assert reads == [tmp_path / "a3.gguf"]
        for bad in ("nothing", "../first", "", ".", "a3.gguf", "a" * 300):
            with pytest.raises(SettingsError, match=f"no adapter .* and {tmp_path} has none"):
                _tokens(engine, ((bad, 1.0),))
        (number, _), *_ = adapters.chosen([("a4", 1.0)])
        (known,) = [of for of in adapters._known.values() if str(of.number) == number]
        known.adapter = None  # others made room, and then its file is replaced
        write_gguf(tmp_path / "a4.gguf", made(base, 97, 2, "attn_v"))
        with pytest.raises(SettingsError, match=r"a4\.gguf has changed: send the request again"):
            adapters.take(((number, 1.0),))
        assert adapters.chosen([("a4", 1.0)])[0][0] != number
        write_gguf(tmp_path / "wide.gguf", made(base, 98, 17, "attn_v"))
        with pytest.raises(SettingsError, match="rank 17: there is room for"):
            _tokens(engine, (("wide", 1.0),))
    with pytest.raises(SettingsError, match=r"^adapter_folder: say with max_adapters"):
        Engine.open(base, adapter_folder=tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        Engine.open(base, adapter_folder=tmp_path / "x", max_adapters=1, max_adapter_rank=4)


@pytest.mark.turns(2)
@pytest.mark.parametrize("split", ["tensors", "layers"])
def test_several_devices(
    base: Path, two: Any, merged: Any, device_name: str, needs_gpus: Any, split: Any
) -> None:
    """Each has A and B of its columns and rows."""
    needs_gpus(2)
    wanted = merged(TOKENS[:5], (two[1][0], SCALES[0]), (two[1][1], -0.5 * SCALES[1]))[-2:]
    with Engine.open(
        base,
        device=device_name,
        gpus=2,
        split=split,
        context=16,
        exact=True,
        kv_dtype="f32",
        adapters=[*zip(two[0], (1.0, -0.5), strict=True)],
        max_adapter_rank=13,
    ) as opened:
        found = np.stack(list(logits_after(opened.session, TOKENS[:4], TOKENS[4:5])))
    assert relative_rms(found, wanted) < 2e-6


def test_drafts_are_verified_with_the_adapters(base: Path, two: Any, device_name: str) -> None:
    answers = []
    for drafts in (None, DraftSettings(most=2, least=2)):
        with Engine.open(
            base,
            device=device_name,
            context=48,
            exact=True,
            kv_dtype="f32",
            adapters=[(two[0][0], 1.0)],
            drafts=drafts,
        ) as opened:
            request = Request(prompt=(5, 6, 7, 8) * 3, settings=GREEDY, limit=8)
            generation = Generation(opened.session, None, request)
            for _ in generation.pieces():
                pass
            answers.append(generation.tokens)
    assert generation.statistics.drafted_tokens > 0
    assert answers[0] == answers[1]


def test_flags_of_a_command(
    base: Path, two: Any, merged: Any, tmp_path: Path, device_name: str, cli: Any
) -> None:
    """A scale is that of the adapter before it; several are added."""
    (first, second), matrices = two
    asked = ("logits", base, "--exact", "--device", device_name, "--tokens", "3,1,4,1,5")
    for number, (flags, scales) in enumerate(
        [
            (("--lora", first), (1.0, 0.0)),
            (("--lora-scaled", f"{first}:0.5"), (0.5, 0.0)),
            (("--lora", first, "--lora-scaled", f"{second}:-0.5"), (1.0, -0.5)),
        ]
    ):
        out = tmp_path / f"{number}.npy"
        code, _, errors = cli(*asked, *flags, "-o", out)
        assert code == 0, errors
        pairs = [
            (of, scale * given) for of, scale, given in zip(matrices, SCALES, scales, strict=True)
        ]
        wanted = merged(TOKENS[:5], *pairs)
        assert relative_rms(np.load(out), wanted) < 2e-6


@pytest.mark.references("adapters", [])
def test_golden_logits(
    name: str, pytestconfig: pytest.Config, tmp_path: Path, device_name: str
) -> None:
    folder = pytestconfig.getoption("--references")
    golden = np.load(folder / f"{name}.npz")
    for part in (name, f"{name}.adapter"):
        packed = (folder / f"{part}.gguf.xz").read_bytes()
        (tmp_path / f"{part}.gguf").write_bytes(lzma.decompress(packed))
    tokens = golden["tokens"].tolist()
    for scale in (None, 1.0, 0.5):
        adapters = [] if scale is None else [(tmp_path / f"{name}.adapter.gguf", scale)]
        with Engine.open(
            tmp_path / f"{name}.gguf",
            device=device_name,
            context=len(tokens),
            kv_dtype="f32",
            exact=True,
            adapters=adapters,
        ) as opened:
            found = np.stack(list(logits_after(opened.session, tokens[:1], tokens[1:])))
        wanted = golden["logits" if scale is None else f"logits_scale_{scale}"]
        error = relative_rms(found, wanted)
        print(f"{name} times {scale}: relative RMS {error:.1e}")
        assert error <= 1e-4
