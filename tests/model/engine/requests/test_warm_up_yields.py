"""Graphs are recorded while nobody asks, and nobody waits for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE, in_some_try, wait_for
from urdir.driver.errors import CudaError
from urdir.model.engine import runner
from urdir.model.engine.batch import Batch, Output, Segment, StepShape
from urdir.model.engine.requests.request import Ending, Item, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.requests.warm_up import WarmUp
from urdir.model.engine.runner import Steps
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session

SHAPES = [StepShape(rows, 256, Output.GREEDY) for rows in (1, 2, 4)]
REQUEST = Request(prompt=(3, 1, 4), settings=GREEDY, limit=3)
#: Calls of the driver that take long: of a compiler, a loader, and of graphs.
LONG = ("cuLinkAddData", "cuLinkComplete", "cuModuleLoadData", "cuGraphInstantiate")


@pytest.fixture
def engine(session: Session) -> Any:
    return SimpleNamespace(session=session, tokenizer=None)


@pytest.fixture
def long_calls(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The threads that make long calls of the driver, and these."""
    api, calls = session.parts.device.api, list[tuple[str, str]]()

    def noted(name: str) -> Callable[..., Any]:
        works = getattr(api, name)

        def call(*args: Any) -> Any:
            calls.append((threading.current_thread().name, name))
            return works(*args)

        return call

    for name in LONG:
        monkeypatch.setattr(api, name, noted(name))
    return calls


def record_for_the_request(session: Session) -> None:
    """The graphs that `REQUEST` takes."""
    segment = Segment(0, 0, len(REQUEST.prompt), chooses=True)
    prompt = session.shapes.of_batch(Batch((), (segment,)), segment.end, Output.GREEDY)
    session.steps.record([prompt, session.shapes.decode(1, 4, Output.GREEDY)])


def prepare_all(session: Session, shape: StepShape) -> None:
    while session.steps.prepare(shape):
        session.steps.wait_for_helper()


def test_kernels_of_needed_graphs_are_asked_for_first(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled in this order."""
    last, *needed = SHAPES
    steps, begun, go = session.steps, list[StepShape](), threading.Event()
    prepare, load = steps.prepare, steps._load_beside

    def noted(shape: StepShape) -> bool:
        if shape == last and shape not in begun:
            assert all(steps.has_asked(each) for each in needed)
        begun.append(shape)
        return prepare(shape)

    def waiting(kernels: Any) -> None:
        go.wait(PATIENCE)
        load(kernels)

    monkeypatch.setattr(type(steps.parts.device), "has_compilers", property(lambda _: True))
    monkeypatch.setattr(steps, "prepare", noted)
    monkeypatch.setattr(steps, "_load_beside", waiting)
    warm_up = WarmUp(steps, SHAPES, needed)
    wait_for(lambda: warm_up.work(0.001) or last in begun)
    go.set()
    while warm_up.left:
        warm_up.work(0.001)
    assert all(steps.is_recorded(shape) for shape in SHAPES)


@pytest.mark.parametrize("wants", [True, False])
def test_processes_that_compile_come_before_graphs(
    session: Session, monkeypatch: pytest.MonkeyPatch, wants: bool
) -> None:
    """While they may soon have nothing to do, kernels of all are asked for, the needed graph is
    recorded, and then the others; else one graph after the other."""
    needed, *others = SHAPES
    steps, recorded = session.steps, list[bool]()
    prepare = steps.prepare

    def noted(shape: StepShape) -> bool:
        had_asked, more = steps.has_asked(shape), prepare(shape)
        if not had_asked and steps.has_asked(shape) and shape in others:
            recorded.append(any(steps.is_recorded(each) for each in others))
        return more

    monkeypatch.setattr(type(steps.parts.device), "wants_kernels", property(lambda _: wants))
    monkeypatch.setattr(steps, "waits", lambda _: False)  # for other processes
    monkeypatch.setattr(steps, "prepare", noted)
    warm_up = WarmUp(steps, SHAPES, [needed])
    while warm_up.left:
        warm_up.work(0)
        steps.wait_for_helper()
    assert recorded == [False, not wants]
    assert all(steps.is_recorded(shape) for shape in SHAPES)


@pytest.mark.parametrize("wants", [True, False])
def test_kernels_for_each_number_of_rows_are_asked_for_first(
    session: Session, monkeypatch: pytest.MonkeyPatch, wants: bool
) -> None:
    """While processes that compile may soon have nothing to do: other graphs need few others."""
    shapes = [StepShape(rows, 256, of) for rows in (1, 2) for of in (Output.GREEDY, Output.SAMPLE)]
    steps, asked = session.steps, list[StepShape]()
    prepare = steps.prepare

    def noted(shape: StepShape) -> bool:
        more = prepare(shape)
        if steps.has_asked(shape) and shape not in asked:
            asked.append(shape)
        return more

    monkeypatch.setattr(type(steps.parts.device), "wants_kernels", property(lambda _: wants))
    monkeypatch.setattr(steps, "waits", lambda _: False)
    monkeypatch.setattr(steps, "prepare", noted)
    warm_up = WarmUp(steps, shapes)
    while warm_up.left:
        warm_up.work(0)
        steps.wait_for_helper()
    assert [shapes.index(shape) for shape in asked] == ([0, 2, 1, 3] if wants else [0, 1, 2, 3])


def test_others_begin_when_the_thread_has_little_to_do(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would work for all in turns."""
    shapes = [StepShape(rows, 256, of) for rows in (1, 2) for of in (Output.GREEDY, Output.SAMPLE)]
    steps, go = session.steps, threading.Event()
    load = steps._load_beside

    def waiting(kernels: Any) -> None:
        assert go.wait(PATIENCE)
        load(kernels)

    monkeypatch.setattr(steps, "_load_beside", waiting)
    warm_up = WarmUp(steps, shapes)
    while warm_up.work(0.001):  # until all that has begun waits
        pass
    assert len(steps._begun) == 2
    go.set()
    while warm_up.left:
        warm_up.work(0.001)
    assert all(steps.is_recorded(shape) for shape in shapes)


def test_what_takes_long_is_another_thread_s(
    session: Session, long_calls: list[tuple[str, str]]
) -> None:
    warm_up = WarmUp(session.steps, SHAPES)
    while warm_up.left:
        warm_up.work(0.001)
    assert all(session.steps.is_recorded(shape) for shape in SHAPES)
    own = threading.current_thread().name
    assert own not in {thread for thread, _ in long_calls}
    instantiated = [name for _, name in long_calls if name == "cuGraphInstantiate"]
    assert len(instantiated) == len(SHAPES)
    assert any(name != "cuGraphInstantiate" for _, name in long_calls)


@pytest.mark.parametrize("held", ["cuGraphInstantiate", "cuModuleLoadData"])
def test_whoever_asks_waits_for_none_of_it(
    session: Session, engine: Any, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """A call that takes for ever keeps nobody but the graph that it is for."""
    record_for_the_request(session)
    api, goes_on, begun = session.parts.device.api, threading.Event(), threading.Event()
    works = getattr(api, held)

    def hold(*args: Any) -> Any:
        begun.set()
        assert goes_on.wait(250)
        return works(*args)

    shapes = [StepShape(4, 256, Output.SAMPLE), *SHAPES]  # which has kernels of its own
    items: list[Item] = []
    ended = threading.Event()

    def note(item: Item) -> None:
        items.append(item)
        if not isinstance(item, Piece):
            ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(api, held, hold)
        with Service(engine, None, warm_up=WarmUp(session.steps, shapes)) as service:
            assert begun.wait(250)
            service.submit(REQUEST, note)
            assert ended.wait(250)
            assert not goes_on.is_set()
            assert isinstance(items[-1], Ending)
            metrics = service.metrics()
            # the request has the graph of SHAPES[0], too
            assert (metrics.graphs_recorded, metrics.graphs_wanted) == (1, 4)
            goes_on.set()
            wait_for(lambda: service.metrics().graphs_recorded == 4)
    assert all(session.steps.is_recorded(shape) for shape in shapes)


def test_a_step_that_needs_the_graph_waits_for_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made once, and not anew."""
    api, made = session.parts.device.api, list[str]()
    works, begun, goes_on = api.cuGraphInstantiate, threading.Event(), threading.Event()

    def instantiate(*args: Any) -> Any:
        made.append(threading.current_thread().name)
        begun.set()
        assert goes_on.wait(PATIENCE)
        return works(*args)

    monkeypatch.setattr(api, "cuGraphInstantiate", instantiate)
    while not begun.is_set():
        assert session.steps.prepare(SHAPES[0])
    assert session.steps.is_waiting
    threading.Timer(0.05, goes_on.set).start()
    graph = session.steps.graph(SHAPES[0])
    assert made == ["recording_0"]
    assert not session.steps.is_waiting
    assert session.steps.graph(SHAPES[0]) is graph
    assert not session.steps.prepare(SHAPES[0])


@pytest.mark.parametrize("name", ["cuGraphInstantiate", "cuModuleLoadData"])
def test_what_fails_there_is_raised_here(emulated_session: Session, name: str) -> None:
    """Nothing of it stays, and it may be tried again."""
    api: Any = emulated_session.parts.device.api
    shape = StepShape(2, 256, Output.SAMPLE)
    graphs = api.live()
    api.inject(name, 1)
    with pytest.raises(CudaError, match=name):
        prepare_all(emulated_session, shape)
    assert {**api.live(), "module": 0} == {**graphs, "module": 0}  # kernels may be used again
    prepare_all(emulated_session, shape)
    assert emulated_session.steps.is_recorded(shape)


def test_closing_ends_what_has_begun(emulated_session: Session) -> None:
    """At whichever piece: no thread runs, and no graph is left."""
    parts, api = emulated_session.parts, emulated_session.parts.device.api
    emulated_session.steps.record(SHAPES)
    live, threads = api.live(), set(threading.enumerate())
    pieces = 0
    while True:
        steps = Steps(parts, 1 << 30)
        for _ in range(pieces):
            if not steps.prepare(SHAPES[0]):
                break
            if pieces % 2:
                steps.wait_for_helper()
        is_done = steps.is_recorded(SHAPES[0])
        steps.close()
        assert set(threading.enumerate()) <= threads
        assert api.live() == live
        if is_done:
            break
        pieces += 1 if pieces < 3 else 7
    assert pieces > 20


def test_what_is_not_gone_on_with_is_given_up(
    emulated_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs for requests that have ended, at whichever piece: nothing of them stays."""
    monkeypatch.setattr(runner, "MOST_BEGUN", 1)
    parts, api = emulated_session.parts, emulated_session.parts.device.api
    emulated_session.steps.record(SHAPES)
    live = api.live()
    with Steps(parts, 1 << 30) as steps:
        for pieces in (1, 3, 10, 20):
            for shape in SHAPES:
                for _ in range(pieces):
                    steps.prepare(shape)
                    steps.wait_for_helper()
                assert [*steps._begun] == [shape]
                assert {*steps._bound} <= {shape}
        while steps.prepare(SHAPES[1]):
            steps.wait_for_helper()
        assert steps.is_recorded(SHAPES[1])
    assert api.live() == live


def test_a_service_that_nobody_asks_sleeps(session: Session, engine: Any) -> None:
    """Once all is recorded, which it says."""
    with Service(engine, None, warm_up=WarmUp(session.steps, SHAPES)) as service:
        wait_for(lambda: service.metrics().graphs_recorded == len(SHAPES))
        assert service.metrics().graphs_wanted == len(SHAPES)
        thread = service._thread.native_id

        def sleeps() -> None:
            time.sleep(0.05)
            before = _ticks(thread)
            time.sleep(0.3)
            assert _ticks(thread) - before <= 1

        in_some_try(sleeps)


def _ticks(thread: int | None) -> int:
    """Hundredths of a second of a processor that a thread has taken."""
    stat = Path(f"/proc/self/task/{thread}/stat")
    if not stat.exists():
        pytest.skip("Linux says what threads take")
    fields = stat.read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
