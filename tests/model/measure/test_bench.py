"""`urdir bench`: what is counted, what is timed, and how it is printed."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import os
import re
import sqlite3
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, OutOfMemoryError
from urdir.model.commands import bench_model, opening
from urdir.model.commands.bench_printers import printer
from urdir.model.commands.bench_report import LoadConditions, Section
from urdir.model.commands.values import number_list
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.options import EngineOptions
from urdir.model.engine.paced_rows import PacedRows
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure import bandwidth as bandwidth_module
from urdir.model.measure import bench as bench_module
from urdir.model.measure import product_rate as product_module
from urdir.model.measure import startup
from urdir.model.measure.bandwidth import doubt, read_bandwidth
from urdir.model.measure.bench import (
    BenchCase,
    BenchRow,
    BenchTest,
    FailedRow,
    Rates,
    _Bench,
    bench,
    time_step,
)
from urdir.model.measure.costs import bytes_per_step, flops_of, moved_per_step
from urdir.model.measure.kernels import bench_gemv
from urdir.model.measure.paper_device import paper_device
from urdir.model.measure.product_rate import product_rate
from urdir.model.measure.profile import ProfileRow, plot_roofline, summarise
from urdir.model.measure.timed_answers import Timing
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.render import jinja as template_environment
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import Layout

Cli = Callable[..., tuple[int, str, str]]

CONDITIONS = {
    *("model", "device", "emulated", "driver", "version", "vram_bytes"),
    *("read_gb_per_s", "product_tflop_per_s"),
}
ROW = {
    *("test", "sequences", "tokens_per_second", "deviation", "median"),
    *("ms_per_token", "ms_per_step"),
    *("bytes_per_token", "moved_per_token", "gb_per_s", "share", "host_us_per_token"),
    *("tflop_per_s", "product_share", "error"),
}


@pytest.fixture
def nano(data: Path) -> Path:
    return data / "golden" / "nano-llama-q8_0.gguf"


@pytest.fixture
def cli(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The shared one, where the bandwidth is measured with little to read."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(bandwidth_module, "EMULATOR_READ_BYTES", (1 << 18,))
    monkeypatch.setattr(product_module, "EMULATOR_SIZE", 32)
    return cli


@pytest.fixture
def engine(nano: Path, device_name: str) -> Iterator[Engine]:
    with Engine.open(str(nano), device=device_name, context=16, sequences=3) as engine:
        yield engine


# ---- what is counted ----


@pytest.mark.slow
def test_bytes_of_an_8b_step() -> None:
    """All weights but the embedding table, which is looked up, and 128 KiB of keys and values for
    each token of context."""
    model = SyntheticModel("llama-3.1-8b", "q4_k_m")
    config = Config.of(model)
    with (
        paper_device("sm_90", 132) as device,
        Weights(model, config, device) as weights,
        Session(device, weights, SessionSettings(200)) as session,
    ):
        cache = session.parts.cache.shape
        needed = bytes_per_step(model, config, cache, 100)
        plan = session.steps.bound(StepShape(1, 256, Output.GREEDY)).plan
        moved = [moved_per_step(plan, length) for length in (100, 101)]
    embedding = 128256 * 4096 * 144 // 256
    whole = sum(t.nbytes for t in model.tensors.values())
    assert needed == whole - embedding + 100 * (128 << 10)
    assert moved[1] - moved[0] == 128 << 10
    assert needed < moved[0] < 1.02 * needed  # some formats are a little larger once repacked


def test_tied_weights_are_read_and_sequences_add_keys() -> None:
    model = SyntheticModel("llama-3.2-1b", "q4_k_m")
    config = Config.of(model)
    cache = CacheShape.of(config, SessionSettings(200), rows=16)
    whole = sum(t.nbytes for t in model.tensors.values())
    assert bytes_per_step(model, config, cache, 0) == whole
    assert bytes_per_step(model, config, cache, 10) == whole + 10 * (32 << 10)
    assert bytes_per_step(model, config, cache, 10, 4) == whole + 40 * (32 << 10)


def test_operations_of_an_8b_prompt() -> None:
    """Two a value of the layers' matrices and token; of the output matrix for one token alone; and
    those of attention, four a query head, dim and key."""
    config = Config.of(SyntheticModel("llama-3.1-8b", "q4_k_m"))
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    keys = sum(range(101, 611))  # of each token, itself included
    products = 2 * (510 * 32 * layer + 128256 * 4096)
    assert flops_of(config, 510, start=100) == products + 4 * keys * 4096 * 32


def test_operations_of_a_mixture_are_those_of_the_experts_used() -> None:
    config = Config.of(SyntheticModel("qwen3-30b-a3b", "q4_k_m"))
    assert flops_of(config, 1) == pytest.approx(2 * 3.0e9, rel=0.05)  # 3.3e9 with the embedding


def test_several_sequences_have_no_room_for_long_prompts() -> None:
    case = BenchCase((8192,), (128,), (0, 256), sequences=(1, 8, 256), pairs=((512, 64),))
    alone, several = case.parts()
    assert (alone.context, alone.most_sequences) == (256 + 8192, 1)
    assert (several.context, several.most_sequences) == (256 + 128 + 31, 256)
    assert len(alone.tests) + len(several.tests) == len(case.tests) == 10
    assert BenchCase().parts() == [BenchCase()]
    prompts, several = BenchCase((64,), (16,), sequences=(4,)).parts()
    assert (prompts.context, len(prompts.tests), len(several.tests)) == (64, 1, 1)
    assert several.context == 1 + 16 + 3
    assert [part.sequences for part in BenchCase((0,), (0,), sequences=(2,)).parts()] == [(2,)]


@pytest.mark.slow
def test_rows_agree_with_themselves(engine: Engine) -> None:
    case = BenchCase((3,), (2,), (0, 2), repeats=2, sequences=(1, 3), pairs=((2, 1),))
    rates = Rates(read=1e9, product=1e12)
    tests = ("pp3", "tg2", "tg2 x 3", "pp2+tg1")
    every = list(bench(engine.session, engine.file, rates, case))
    assert [row.test for row in every] == [*tests, *(f"{test} @ d2" for test in tests)]
    prompt, single, three, pair = rows = every[4:]
    assert prompt.bytes_per_token is prompt.share is prompt.host_us_per_token is None
    for row, tokens, outputs in ((prompt, 3, 1), (single, 2, 2), (pair, 3, 1)):
        rate = flops_of(engine.config, tokens, 2, outputs) / tokens * row.tokens_per_second
        assert row.tflop_per_s == row.product_share == pytest.approx(rate / 1e12)
    for row in rows:
        assert row.tokens_per_second > 0
        assert row.deviation >= 0
        assert row.median == pytest.approx(row.tokens_per_second)  # of two runs
    for row in (single, three):
        assert row.bytes_per_token
        assert row.gb_per_s
        assert row.ms_per_step == pytest.approx(row.ms_per_token * row.sequences)
        rate = row.bytes_per_token * row.tokens_per_second
        assert row.gb_per_s * 1e9 == pytest.approx(rate, rel=1e-3)
        assert row.share == pytest.approx(row.gb_per_s)
        # Emulated kernels run while the host waits: what is left is a small part.
        assert row.host_us_per_token
        assert 0 < row.host_us_per_token < 1e3 * row.ms_per_token
    cache = engine.session.parts.cache.shape
    needed = bytes_per_step(engine.file, engine.config, cache, 3, 3)
    assert three.bytes_per_token == round(needed / 3)


@pytest.mark.slow
def test_steps_of_fewer_rows_are_recorded_before(
    nano: Path, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that answers may take in turns: none is recorded in what is timed."""
    case = BenchCase((0,), (2,), repeats=1, sequences=(9,))
    with Engine.open(str(nano), device=device_name, context=case.context, sequences=9) as engine:
        session, recorded = engine.session, list[bool]()
        session.paced = PacedRows()

        def decoded(session: Session, *_: object) -> Timing:
            shapes = [session.shapes.decode(rows, 2, Output.GREEDY) for rows in (8, 9)]
            recorded.append(all(session.steps.is_recorded(shape) for shape in shapes))
            return Timing(18, 1.0, 0.5)

        monkeypatch.setattr(bench_module, "time_decoding", decoded)
        monkeypatch.setattr(bench_module, "_MOST_UNTIMED", 1)
        (row,) = bench(session, engine.file, Rates(1e9, 1e12), case)
    assert isinstance(row, BenchRow)
    assert recorded == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "count", "name"),
    [pytest.param(6, 1, "tg6", marks=pytest.mark.full), (5, 2, "tg5 x 2")],
)
def test_decoding_may_reach_the_end_of_the_context(
    nano: Path, device_name: str, steps: int, count: int, name: str
) -> None:
    """Which is that of the caches: no step lies beyond it."""
    case = BenchCase((0,), (steps,), (250,), repeats=1, sequences=(count,))
    with Engine.open(
        str(nano), device=device_name, context=case.context, sequences=count
    ) as engine:
        assert engine.session.shapes.lengths == (case.context,) == (256,)
        rows = list(bench(engine.session, engine.file, Rates(1e9, 1e12), case))
    assert [(row.test, type(row)) for row in rows] == [(f"{name} @ d250", BenchRow)]


def profile_step(session: Session, bandwidth: float, sequences: int = 1) -> Sequence[ProfileRow]:
    return summarise(*time_step(session, sequences), bandwidth, sequences)


def test_a_trace_has_every_launch_in_order(
    cli: Cli, nano: Path, tmp_path: Path, engine: Engine
) -> None:
    path = tmp_path / "out.json"
    words = ("-p", "0", "-n", "1", "-r", "1", "--trace", path)
    code, out, err = cli("bench", nano, *words)
    assert code == 0, err
    assert "attn_qkv" in out  # the profile, too
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    nodes = [node for graph in trace["graphs"] for node in graph["nodes"]]
    assert len({node["tools_id"] for node in nodes}) in (1, len(nodes))  # none, or all
    assert {event["name"] for event in events if event["ph"] == "X"} <= {
        node["label"] for node in nodes
    }
    launches = [event for event in events if event["ph"] == "X"]
    plan = engine.session.steps.bound(StepShape(1, 256, Output.GREEDY)).plan
    assert [event["name"] for event in launches] == [op.label for op in plan]
    assert [event["args"]["bytes"] for event in launches] == [op.bytes_moved() for op in plan]
    for event, later in itertools.pairwise(launches):
        assert event["dur"] > 0
        assert event["ts"] + event["dur"] == pytest.approx(later["ts"], abs=0.01)
    assert {event["name"] for event in events} >= {"process_name", "thread_name"}


@pytest.mark.parametrize("other", [("--kernels",), ("--embed", "1,8"), ("--startup",)])
def test_a_trace_is_of_decode_steps(cli: Cli, nano: Path, other: tuple[str, ...]) -> None:
    code, _, err = cli("bench", nano, *other, "--trace", "out.json")
    assert code == 2
    assert "--trace: only decode steps" in err


def test_a_profile_accounts_for_every_launch(engine: Engine) -> None:
    rows = profile_step(engine.session, 1e9)
    shape = StepShape(1, 256, Output.GREEDY)
    plan = engine.session.steps.bound(shape).plan
    assert sum(row.calls for row in rows) == len(plan)
    assert sum(row.bytes_moved for row in rows) == sum(op.bytes_moved() for op in plan)
    qkv = next(row for row in rows if "attn_qkv" in row.role)
    assert qkv.flops >= 2 * 2 * (256 + 2 * 128) * 256  # two layers
    assert qkv.intensity == qkv.flops / qkv.bytes_moved
    times = [row.microseconds for row in rows]
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_a_profile_is_of_as_many_sequences_as_are_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches of a step of all three, each on tokens of its own."""
    places = []
    really = execute.profile

    def profile(*args: Any, **more: Any) -> Any:
        places.append(engine.session.parts.state.positions())
        return really(*args, **more)

    monkeypatch.setattr("urdir.driver.execute.profile", profile)
    rows = profile_step(engine.session, 1e9, 3)
    plan = engine.session.steps.bound(StepShape(3, 256, Output.GREEDY)).plan
    assert sum(row.bytes_moved for row in rows) == sum(op.bytes_moved() for op in plan)
    assert {row.sequences for row in rows} == {3}
    assert any("gemm_small" in row.role for row in rows)
    assert places == [{0: 0, 1: 0, 2: 0}]
    profile_step(engine.session, 1e9)
    assert places[1] == {0: 0}


def test_a_slow_device_is_doubted() -> None:
    assert doubt("NVIDIA H200", 4.5e12) == doubt("NVIDIA L4", 0.2e12) == ""
    assert "4.39 TB/s" in doubt("NVIDIA H200", 4.39e12)


def test_a_doubtful_run_warns(cli: Cli, nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_module, "EXPECTED", {"emulator": 1e12})
    code, _, err = cli("bench", nano, "-p", "0", "-n", "1", "-r", "1")
    assert code == 0
    assert "does not count" in err


# ---- kernels alone ----


def test_products_beside_a_read_only_kernel(device_name: str) -> None:
    shapes = ((5, 256), (7, 512))
    with Device.open(device_name) as device:
        rows = list(bench_gemv(device, ("Q6_K", "F16"), shapes, turn_bytes=20_000))
    assert [(r.type, r.rows, r.cols) for r in rows] == [
        (kind, *shape) for kind in ("Q6_K", "F16") for shape in shapes
    ]
    for row in rows:
        assert row.weight_bytes == Layout(FORMATS[row.type], row.rows, row.cols).tiles_nbytes
        assert row.launches * row.weight_bytes >= 20_000 - 256 * row.launches
        assert 0 < row.best_us <= row.median_us
        assert row.share == pytest.approx(row.read_us / row.best_us)
        assert row.gb_per_s == pytest.approx(row.weight_bytes / row.best_us / 1e3)


@pytest.mark.slow
def test_the_kernels_section(cli: Cli) -> None:
    code, out, err = cli("bench", "--kernels", "-o", "jsonl")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert "emulator" in err
    assert {r["type"] for r in records} == {"Q4_K", "Q6_K", "Q8_0", "F16"}
    assert all(r["section"] == "matvecs" and set(r) > CONDITIONS for r in records)


# ---- start-up ----


@pytest.mark.slow
def test_the_startup_section(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few of the model's kernels, and some templates: to compile all takes half a minute."""
    monkeypatch.setenv("URDIR_CACHE_DIR", str(tmp_path))
    all_kernels, some = startup.model_kernels, template_environment.template_names()[::6]
    monkeypatch.setattr(startup, "model_kernels", lambda *words: all_kernels(*words)[::24])
    monkeypatch.setattr(template_environment, "template_names", lambda: some)
    once = functools.cache(startup._first_output_s)  # not before, too, which makes it warm
    monkeypatch.setattr(startup, "_first_output_s", once)
    code, out, err = cli("bench", "--startup", "-o", "json")
    assert code == 0, err
    rows = json.loads(out)["startup"]
    phases = {row["phase"]: (row["value"], row["unit"]) for row in rows}
    assert [unit for _, unit in phases.values()] == [*["ms"] * 10, "GB/s", "ms", "s"]
    assert all(value > 0 for value, _ in phases.values())
    parts = ("driver loaded", "file read and checked", "device opened")
    parts += ("tokeniser built", "first graphs recorded")
    (note,) = (row["note"] for row in rows if row["phase"] == "weights loaded")
    longest = max(*(phases[part][0] for part in parts), 1e3 * float(note.split()[-2]) - 5)
    assert longest <= phases["opened, all of that"][0]
    imported = phases["modules imported"][0] / 1e3
    assert imported < phases["process to first token"][0]
    cold, warm = phases["PTX compiled, cold"][0], phases["cubins loaded, warm"][0]
    assert warm < cold
    (note,) = (row["note"] for row in rows if row["phase"] == "templates compiled")
    assert note == f"{len(some)} templates"
    assert [path.name for path in tmp_path.iterdir()] == ["emulator"]  # cubins, no code of the host


@pytest.mark.full
@pytest.mark.slow
def test_a_model_without_a_vocabulary_gives_no_text_at_the_start(
    cli: Cli, nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_kernels = startup.model_kernels
    monkeypatch.setattr(startup, "model_kernels", lambda *words: all_kernels(*words)[:5])
    code, out, err = cli("bench", nano, "--startup", "-o", "json")
    assert code == 0, err
    phases = {row["phase"] for row in json.loads(out)["startup"]}
    assert {"opened, all of that", "first graphs recorded"} <= phases
    assert not {"tokeniser built", "process to first token"} & phases


# ---- how it is printed ----


#: What `report` has measured, by function and case.
MEASURED: dict[tuple[str, str], list[Any]] = {}


@pytest.fixture
def report(cli: Cli, nano: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The command's output in a format; what is measured for the first one serves all."""

    def once(name: str) -> Callable[..., list[Any]]:
        really = getattr(bench_module, name)

        def measured(*words: Any) -> list[Any]:
            key = name, str(words[-1])
            if key not in MEASURED:
                MEASURED[key] = list(really(*words))
            return MEASURED[key]

        return measured

    for name in ("bench", "time_step"):
        monkeypatch.setattr(bench_module, name, once(name))

    def run(kind: str) -> str:
        words = ("-p", "2", "-n", "2", "-r", "1", "-npl", "1,2", "--profile", "-o", kind)
        code, out, err = cli("bench", nano, *words)
        assert code == 0
        assert "emulator" in err
        return out

    return run


@pytest.mark.slow
def test_json_is_one_object(report: Callable[[str], str]) -> None:
    found = json.loads(report("json"))
    assert set(found) == CONDITIONS | {"rows", "profile"}
    assert [row["test"] for row in found["rows"]] == ["pp2", "tg2", "tg2 x 2"]
    assert all(set(row) == ROW for row in found["rows"])
    assert found["read_gb_per_s"] > 0
    assert found["emulated"] is True


@pytest.mark.slow
def test_jsonl_and_csv_rows_are_complete(report: Callable[[str], str]) -> None:
    records: list[dict[str, Any]] = [json.loads(line) for line in report("jsonl").splitlines()]
    rows = [r for r in records if r["section"] == "rows"]
    assert [r["test"] for r in rows] == ["pp2", "tg2", "tg2 x 2"]
    assert all(set(r) == ROW | CONDITIONS | {"section"} for r in rows)
    table = list(csv.DictReader(io.StringIO(report("csv"))))
    assert [r["test"] for r in table if r["section"] == "rows"] == ["pp2", "tg2", "tg2 x 2"]
    assert all(r["model"] and r["device"] and float(r["read_gb_per_s"]) > 0 for r in table)
    assert len(table) == len(records)


@pytest.mark.slow
def test_markdown_has_a_table_a_section(report: Callable[[str], str]) -> None:
    lines = report("md").splitlines()
    assert any(re.match(r"\| tg2 x 2 +\|", line) for line in lines)
    # the launches of both layers, for one sequence and for two
    assert any(re.match(r"\| blk\.\*\.ffn_down gemv +\| +1 \| +2 \|", line) for line in lines)
    assert any(re.match(r"\| blk\.\*\.ffn_down gemm_small +\| +2 \| +2 \|", line) for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        *(("-npl", "0"), ("-npl", "1,x"), ("-npl", "4-2"), ("-p", "0-8*2"), ("-p", "2-8*1")),
        *(("-pg", "5"), ("-b", "0"), ("--kernels", "--startup"), ("x.gguf", "-m", "y.gguf")),
    ],
)
def test_bad_usage(cli: Cli, words: tuple[str, ...]) -> None:
    assert cli("bench", *words)[0] == 2


FAILING = ("-p", "2", "-n", "2", "-r", "1", "-npl", "1,2,3", "--device", "emulator")


@pytest.fixture
def no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences cannot be decoded together."""
    decoded = _Bench._decoded

    def failing(bench: _Bench, test: BenchTest) -> BenchRow:
        if test.sequences == 2:
            raise IndexError("no such | bucket")
        return decoded(bench, test)

    monkeypatch.setattr(_Bench, "_decoded", failing)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pairs")
def test_what_fails_is_a_row(cli: Cli, nano: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Named with its error, and the others are measured; one that is ours is logged."""
    code, out, _ = cli("bench", nano, *FAILING)
    assert code == 1
    assert "tg2 x 2 failed" in caplog.text
    rows = [re.split(r"(?<!\\)\|", line) for line in out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert [row[0] for row in cells[2:]] == ["pp2", "tg2", "tg2 x 2", "tg2 x 3"]
    assert cells[4] == ["tg2 x 2", "IndexError: no such \\| bucket", *"-" * 9]
    assert all("±" in row[1] for row in (*cells[2:4], cells[5]))
    assert len({len(row) for row in cells}) == 1
    code, out, _ = cli("bench", nano, *FAILING, "-o", "jsonl")
    assert code == 1
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["test"] for r in records if r["error"] is None] == ["pp2", "tg2", "tg2 x 3"]
    (failed,) = (r for r in records if r["error"] is not None)
    assert set(failed) == ROW | CONDITIONS | {"section"}
    assert (failed["sequences"], failed["tokens_per_second"]) == (2, None)


@pytest.mark.slow
def test_sequences_without_room_are_rows(
    cli: Cli, nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opening.open_engine

    def short(wanted: EngineOptions) -> Engine:
        assert wanted.sequences is not None
        if wanted.sequences > 1:
            raise OutOfMemoryError("CUDA_ERROR_OUT_OF_MEMORY", 2, "cuMemAlloc of the cache")
        return opened(wanted)

    monkeypatch.setattr(bench_model, "open_engine", short)
    code, out, _ = cli("bench", nano, *FAILING, "-o", "json")
    assert code == 1
    rows = json.loads(out)["rows"]
    assert [row["test"] for row in rows] == ["pp2", "tg2", "tg2 x 2", "tg2 x 3"]
    assert ["cuMemAlloc of the cache" in (row["error"] or "") for row in rows] == [0, 0, 1, 1]
    code, out, err = cli("bench", nano, "-p", "0", "-npl", "2", "-o", "json")
    assert (code, out) == (1, "")
    assert "cuMemAlloc of the cache" in err


@pytest.mark.slow
def test_a_lost_device_ends_the_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the row that met it."""
    error = CudaError("CUDA_ERROR_ILLEGAL_ADDRESS", 700, "a step")

    def lost(*args: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(_Bench, "_decoded", lost)
    case = BenchCase((2,), (2,), repeats=1, sequences=(1, 2))
    rows = bench(engine.session, engine.file, Rates(1e9, 1e12), case)
    assert next(rows).test == "pp2"
    failed = next(rows)
    assert isinstance(failed, FailedRow)
    assert failed == FailedRow("tg2", 1, str(error))
    with pytest.raises(CudaError):
        next(rows)


@pytest.mark.parametrize("kind", ["md", "csv", "jsonl", "sql", "json"])
def test_rows_are_printed_as_they_come(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """But of JSON, which is one object."""
    section = Section("rows", {"test": lambda r: r["test"]}, (BenchRow, FailedRow))
    under = LoadConditions("m", "s", "8 users", "5", "6", 0, "1")
    printing, shown = printer(kind, [section]), ""
    for number in range(3):
        test = f"pp{number}"
        row = FailedRow(test, 1, "no") if number == 1 else BenchRow(test, 1, *[1.0] * 6)
        printing.add(under, section, [row])
        new = capsys.readouterr().out
        assert (test in new) == (kind != "json")
        shown += new
    printing.end()
    shown += capsys.readouterr().out
    assert all(shown.count(f"pp{number}") == 1 for number in range(3))
    if kind == "csv":
        assert len({len(row) for row in csv.reader(io.StringIO(shown))}) == 1


# ---- the roofline ----


def test_plotting_needs_matplotlib(
    cli: Cli, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = cli("bench", nano, "--plot", tmp_path / "x.png")
    assert (code, out) == (1, "")
    assert "pip install 'urdir[plot]'" in err


class FakeAxes:
    """Takes what is drawn; knows what is asked of matplotlib, which it stands in for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **_: self.calls.append((name, args))


def test_a_roofline_has_a_point_for_every_kernel(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes, saved = FakeAxes(), []

    class Figure:
        def __init__(self, **_: object) -> None: ...

        def add_subplot(self) -> FakeAxes:
            return axes

        def savefig(self, path: Path) -> None:
            saved.append(path)

    module = types.ModuleType("matplotlib.figure")
    module.Figure = Figure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    rows = profile_step(engine.session, 1e9)
    plot_roofline(rows, 1e9, "title", tmp_path / "x.png")
    points = [args for name, args in axes.calls if name == "scatter"]
    assert points == [([r.intensity], [r.gflops]) for r in rows if r.flops]
    (roof,) = (args for name, args in axes.calls if name == "plot")
    assert [y / x for x, y in zip(*roof, strict=True)] == pytest.approx([1.0, 1.0])  # GB/s
    assert saved == [tmp_path / "x.png"]


def test_a_roofline_is_a_picture(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with the optional matplotlib")
    path = tmp_path / "roofline.png"
    plot_roofline(profile_step(engine.session, 1e9), 1e9, "a step", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_rate_of_a_product_is_measured(device_name: str) -> None:
    with Device.open(device_name) as device:
        assert product_rate(device) > 1e3


def test_sql_can_be_read(report: Callable[[str], str]) -> None:
    with closing(sqlite3.connect(":memory:")) as base:
        base.executescript(report("sql"))
        tests = base.execute("SELECT test, model FROM urdir_bench_rows").fetchall()
        assert [test for test, _ in tests] == ["pp2", "tg2", "tg2 x 2"]
        assert base.execute("SELECT count(*) FROM urdir_bench_profile").fetchone()[0] > 10


def test_lists_of_numbers() -> None:
    numbers = number_list(1)
    assert numbers("512") == (512,)
    assert numbers("1,4-6,16-64*2,10-30+10") == (1, 4, 5, 6, 16, 32, 64, 10, 20, 30)


def test_read_bandwidth_is_measured(device_name: str) -> None:
    with Device.open(device_name) as device:
        assert read_bandwidth(device) > 1e6


@pytest.mark.parametrize(("graphs", "timed"), [(0, [2, 3]), (2, [4, 5]), (1000, [6, 7])])
def test_untimed_runs_leave_no_graph(graphs: int, timed: list[int]) -> None:
    """Another one follows each that left one to be made, and not for ever."""
    runs, left = itertools.count(1), graphs

    def finish() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    device = types.SimpleNamespace(is_emulated=False)
    parts, steps = types.SimpleNamespace(device=device), types.SimpleNamespace(finish=finish)
    session: Any = types.SimpleNamespace(parts=parts, steps=steps)
    unused: Any = None
    bench = bench_module._Bench(session, unused, unused, repeats=2)
    assert bench._timed(lambda: next(runs)) == timed
