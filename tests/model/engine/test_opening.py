"""Opening an engine: what runs side by side, and that nothing is left of an opening that fails."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.stepping import answer
from tests.patience import PATIENCE
from urdir.driver import bindings
from urdir.driver.apart import Compilers
from urdir.driver.device import Device
from urdir.driver.errors import DriverError
from urdir.model.engine import engine_parts
from urdir.model.engine.engine import Engine
from urdir.model.engine.loading import Loading
from urdir.model.engine.requests.request import Request
from urdir.model.engine.runner import Steps
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.errors import GgufError, ModelError
from urdir.model.memory.weights import Weights
from urdir.model.text.tokenizer import Tokenizer
from urdir.ptxgen.kernels.add import Add


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The emulated driver of every device that the test opens. At its end no thread may be left
    over, and no context; turns are as long as before, and cycles are collected.
    """
    made = bindings.emulated(total_memory=256 << 20)
    monkeypatch.setattr(bindings, "emulated", lambda target, **_: made)
    before, turn = set(threading.enumerate()), sys.getswitchinterval()
    yield made
    assert sys.getswitchinterval() == turn
    assert gc.isenabled()
    assert set(threading.enumerate()) <= before
    assert not made.cuDevicePrimaryCtxGetState(0)[2]  # None where there was no device


@pytest.fixture
def model(data: Path) -> Path:
    return data / "golden" / "nano-llama-q8_0.gguf"


def open_engine(
    model: Path | None, work: Callable[[Loading], None] = lambda loading: None, **more: Any
) -> Engine:
    """An engine, after ``work`` while its weights were loaded."""
    keywords = {"device": "emulator", "context": 32, "cache_folder": None, **more}
    with Engine.opening(model, **keywords) as loading:
        work(loading)
        return Engine(loading)


def prepare(loading: Loading, tokens: int) -> None:
    """Record the graphs of a prompt of so many tokens."""
    loading.prepare(Request(prompt=(1,) * tokens, settings=GREEDY))


# ---- side by side ----


@pytest.mark.quick
def test_the_caller_prepares_while_device_tokeniser_and_weights_are_not_ready(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two threads waits for what the caller does; the other way round it would hang."""
    prepared = threading.Event()

    def later(work: Any) -> Any:
        def run(*args: Any, **more: Any) -> Any:
            assert prepared.wait(PATIENCE)
            return work(*args, **more)

        return run

    def work(loading: Loading) -> None:
        prepare(loading, 5)
        assert not gc.isenabled()
        prepared.set()

    checked = Tokenizer.checked
    monkeypatch.setattr(Weights, "upload", later(Weights.upload))
    monkeypatch.setattr(Tokenizer, "checked", lambda gguf: later(checked(gguf)))
    with open_engine(None, work, text=True) as engine:
        assert engine.tokenizer.encode("a")
        parts = {"driver", "file", "device", "tokenizer", "weights", "graphs"}
        assert engine.seconds.keys() == parts


def test_what_was_prepared_is_what_runs(
    api: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [1, 2, 3, 4, 5]

    def first_token(engine: Engine) -> list[int]:
        return answer(engine.session, prompt, 1)

    with open_engine(model) as engine:
        expected = first_token(engine)
    with open_engine(model, lambda loading: prepare(loading, len(prompt))) as engine:
        recorded: list[Any] = []
        monkeypatch.setattr(Steps, "_recording", lambda self, shape: recorded.append(shape))
        assert first_token(engine) == expected
        assert recorded == []


@pytest.mark.parametrize("tokens", [1, 32, 1000])
def test_prompts_of_any_length_can_be_prepared_for(api: Any, model: Path, tokens: int) -> None:
    with open_engine(model, lambda loading: prepare(loading, tokens)) as engine:
        assert engine.session.steps.graph_bytes


# ---- what fails ----


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        ("allocation", 1),  # weights
        ("allocation", 3),
        ("allocation", 4),
        ("host_allocation", 1),
        ("host_allocation", 2),
        ("link", 1),
        ("module_load", 1),
        ("instantiate", 1),
        ("launch", 1),  # repacking
        ("launch", 9),
    ],
)
def test_a_fault_in_any_thread_ends_the_opening(api: Any, model: Path, kind: str, nth: int) -> None:
    api.inject(kind, nth=nth)
    with pytest.raises(DriverError):
        open_engine(model, lambda loading: prepare(loading, 3))
    assert not api.pending_faults()


def test_no_device(api: Any, model: Path) -> None:
    api.inject("init")
    with pytest.raises(DriverError):
        open_engine(model)


def test_no_file(api: Any, tmp_path: Path) -> None:
    with pytest.raises(GgufError):
        open_engine(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("after", "offset", "byte", "message"),
    [
        (b"general.architecture", 12, ord("L"), "Llama"),
        (b"output_norm.weight", -1, ord("x"), "output_norm.weigh"),  # its name
        (b"output_norm.weight", 4, 1, "corrupt file"),  # its size
        (b"output_norm.weight", 12, 99, "output_norm.weight.*type"),  # its type
    ],
)
def test_a_file_is_refused_before_anything_is_allocated(
    api: Any, model: Path, tmp_path: Path, after: bytes, offset: int, byte: int, message: str
) -> None:
    raw = bytearray(model.read_bytes())
    raw[raw.index(after) + len(after) + offset] = byte
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=message):
        open_engine(tmp_path / "bad.gguf")
    assert not api.event_counts["cuMemAlloc"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"), [(b"gpt9", "tokeniser 'gpt9'"), (None, "no vocabulary")]
)
def test_a_kind_of_vocabulary_is_refused_before_anything_is_allocated(
    api: Any, model: Path, demo_file: Path, tmp_path: Path, kind: bytes | None, message: str
) -> None:
    raw = demo_file.read_bytes().replace(b"gpt2", kind, 1) if kind else model.read_bytes()
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=message):
        open_engine(tmp_path / "bad.gguf", text=True)
    assert not api.event_counts["cuMemAlloc"]


def test_the_caller_fails(api: Any, model: Path) -> None:
    def work(loading: Loading) -> None:
        raise ModelError("an empty prompt")

    with pytest.raises(ModelError, match="empty prompt"):
        open_engine(model, work)


def test_a_model_becomes_an_engine_once(api: Any, model: Path) -> None:
    with Engine.opening(model, device="emulator", context=32, cache_folder=None) as loading:
        assert loading.config.n_layers == 2
        assert loading.device.is_emulated
        with Engine(loading) as engine:
            assert answer(engine.session, [1, 2], 1)
            with pytest.raises(ModelError, match="an engine already"):
                Engine(loading)


def test_a_model_that_is_closed_becomes_no_engine(api: Any, model: Path) -> None:
    with Engine.opening(model, device="emulator", context=32, cache_folder=None) as loading:
        pass
    with pytest.raises(ModelError, match="is closed"):
        Engine(loading)


def test_a_file_without_a_vocabulary_opens(api: Any, model: Path) -> None:
    with open_engine(model) as engine, pytest.raises(ModelError, match="no vocabulary"):
        _ = engine.tokenizer


@pytest.mark.quick
def test_ctrl_c_stops_an_upload(api: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the weights' thread would go on for long, were it not stopped."""
    ended = threading.Event()

    def upload(self: Weights, gguf: Any, stop: threading.Event, _: Any = None) -> None:
        if stop.wait(PATIENCE):
            ended.set()

    def work(loading: Loading) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Weights, "upload", upload)
    with pytest.raises(KeyboardInterrupt):
        open_engine(model, work)
    assert ended.is_set()


def test_compilers_start_for_a_first_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the service leaves of the memory, and with the modules of kernels."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(2))  # one process
    with Device.open("emulator", cache_folder=tmp_path) as device:
        engine_parts._fork_compilers(device, 1.0, None)
        assert not device.has_compilers
        engine_parts._fork_compilers(device, 0.5, None)
        assert device.has_compilers
        kernel = Add(n=512)
        device.compile_beside([kernel])
        monkeypatch.setattr(Add, "ptx", None)  # which is not rendered here
        (loaded,) = device.load_all([kernel])
        assert loaded.kernel is kernel


def test_compilers_end_where_an_emulator_stands_in_for_a_gpu(
    api: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin before that is known, for a service alone."""
    found: list[Compilers] = []

    def begun(device: str, folder: Path | None) -> Compilers:
        assert (device, folder) == ("emulator", tmp_path)
        found.append(Compilers("emulator", folder, None, 1))
        found[-1].begin()
        return found[-1]

    monkeypatch.setattr("urdir.driver.apart.compilers_for", begun)
    open_engine(model, cache_folder=tmp_path).close()
    assert not found

    def work(loading: Loading) -> None:
        assert found[0]._is_closed
        assert not loading.device.has_compilers

    open_engine(model, work, cache_folder=tmp_path, warms_up=True).close()
    assert len(found) == 1
