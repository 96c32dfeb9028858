"""Hostile constraints, and the processes that they have: limits of time and memory, processes that
are killed, many clients at once. After each, good constraints go on.
"""

from __future__ import annotations

import io
import os
import random
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import PATIENCE, wait_for
from urdir.model.errors import BusyError, ConstraintError, ModelError
from urdir.model.text import constraint_starter, constraint_worker
from urdir.model.text import matcher as matcher_module
from urdir.model.text.constraint_process import LIMITS, ProcessGoneError
from urdir.model.text.constraint_worker import COMPILE, DRAFT, FAILED, FOLLOW, HEADER, STEP
from urdir.model.text.constraints import Constraint
from urdir.model.text.matcher import ConstraintCompiler, Matcher
from urdir.model.text.tokenizer import Tokenizer

HAS_PROC = Path("/proc/self/stat").exists()
GOOD = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
#: The library computes without end on the first, and for 2.5 s and more at the eleventh token of
#: the second, whatever fuel it has.
ENDLESS = Constraint.json_schema(
    {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{20 + i}}}"} for i in range(20)]}
)
LATE = Constraint.lark(
    'start: A\nA: /x{10}/ ("ok" | B)\nB: '
    + " & ".join(f"/.*[^{chr(97 + i)}].{{5}}/" for i in range(24))
)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[ConstraintCompiler]:
    with ConstraintCompiler(tokenizer) as opened:
        yield opened


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[ConstraintCompiler]:
    """One of this test alone."""
    with ConstraintCompiler(tokenizer) as opened:
        yield opened


def allowed(matcher: Matcher, tokenizer: Tokenizer) -> list[int]:
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    matcher.mask(mask)
    found: list[int] = np.flatnonzero(
        np.unpackbits(mask.view(np.uint8), bitorder="little")
    ).tolist()
    return found


def walk(
    tokenizer: Tokenizer, matcher: Matcher, steps: int, chance: random.Random | None = None
) -> None:
    """Take steps, the longest token of each mask, or any: a few constraints fail only there."""
    for _ in range(steps):
        tokens = sorted(set(allowed(matcher, tokenizer)) - tokenizer.end_ids)
        if not tokens:
            return
        longest = max(tokens, key=lambda token: len(tokenizer.token_bytes(token)))
        matcher.accept(chance.choice(tokens) if chance else longest)


def check_good(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    """A good constraint is compiled and followed."""
    matcher = compiler.matcher(GOOD)
    for char in '{"a": 12}':
        matcher.accept(tokenizer.encode(char)[0])
    assert matcher.is_done


def resident() -> int:
    """Bytes of this process; 0 where the system does not say."""
    if not HAS_PROC:
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> set[int]:
    """Processes that a process has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.add(int(path.parent.name))
    return found


def source_pid(compiler: ConstraintCompiler) -> int:
    """The process that has the vocabulary and forks."""
    source: Any = compiler._starter._source
    pid: int = source._process.pid
    return pid


# ---- kinds ---------------------------------------------------------------------------------------


def _nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def _hostile() -> Iterator[tuple[str, Callable[[], Constraint]]]:
    schema, lark, regex = Constraint.json_schema, Constraint.lark, Constraint.regex
    yield "endless", lambda: ENDLESS
    yield "late", lambda: LATE
    yield "no such rule", lambda: lark("start: a")
    yield "no text", lambda: schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
    yield "unknown keyword", lambda: schema({"type": "array", "uniqueItems": True})
    yield "open bracket", lambda: regex("[")
    yield "look-around", lambda: regex("(?=a)b")
    yield "parentheses", lambda: regex("(" * 20_000 + "a" + ")" * 20_000)
    yield "lark parentheses", lambda: lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000)
    yield (
        "doubling",
        lambda: lark(
            "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "a"'
        ),
    )
    yield (
        "products",
        lambda: schema(
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(6)]} for i in range(12)]}
        ),
    )
    yield (
        "many properties",
        lambda: schema(
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
        ),
    )
    yield "many words", lambda: lark("start: " + " | ".join(f'"w{i}" start' for i in range(8000)))
    yield "depth", lambda: lark("start: %json " + _nested(120))
    yield "multiple of true", lambda: schema({"type": "integer", "multipleOf": True})
    yield "bad option", lambda: schema({"type": "object", "x-guidance": 3})
    yield (
        "bounded repeats",
        lambda: lark("start: A\nA: /((((a{1,99}b){1,99}c){1,99}d){1,99}e){1,99}/ & /.*(ab){99}.*/"),
    )
    yield (
        "wide",
        lambda: lark("start: A\nA: " + " & ".join(f"/.*{c}.{{500}}/" for c in "abcdefghijklmnop")),
    )


HOSTILE = dict(_hostile())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_fail_in_time(
    tokenizer: Tokenizer, shared: ConstraintCompiler, name: str
) -> None:
    check_good(tokenizer, shared)
    started, before = time.process_time(), resident()
    with pytest.raises(ConstraintError) as caught:
        walk(tokenizer, shared.matcher(HOSTILE[name]()), 12)
    assert time.process_time() - started < 2  # this process; the other has limits of its own
    assert resident() - before < 32 << 20
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    check_good(tokenizer, shared)


def _large() -> Iterator[tuple[str, Callable[[], Constraint]]]:
    schema, lark = Constraint.json_schema, Constraint.lark
    yield "enum", lambda: schema({"enum": [f"{i:05}" * 2 for i in range(8000)]})
    yield "lengths", lambda: schema({"type": "string", "minLength": 50_000, "maxLength": 100_000})
    yield (
        "items",
        lambda: schema(
            {"items": {"items": {"type": "integer"}, "minItems": 3000}, "minItems": 3000}
            | {"type": "array"}
        ),
    )
    yield (
        "references",
        lambda: schema(
            {"$ref": "#/$defs/a0", "$defs": {"a60": {"type": "null"}}
             | {f"a{i}": {"prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 4} for i in range(60)}}
        ),
    )  # fmt: skip
    yield "depth", lambda: lark("start: %json " + _nested(90))
    yield "ambiguous", lambda: lark('start: (("a" | "a" "a")*)*')


LARGE = dict(_large())


@pytest.mark.parametrize("name", LARGE)
def test_large_constraints_are_followed_or_refused(
    tokenizer: Tokenizer, shared: ConstraintCompiler, name: str
) -> None:
    before = resident()
    with suppress(ConstraintError):
        walk(tokenizer, shared.matcher(LARGE[name]()), 30)
    assert resident() - before < 32 << 20
    check_good(tokenizer, shared)


# ---- limits --------------------------------------------------------------------------------------


@contextmanager
def limited(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name, value in limits.items():
            patch.setitem(LIMITS, name, value)
        yield


def test_compiling_has_a_limit_of_time(tokenizer: Tokenizer, shared: ConstraintCompiler) -> None:
    for _ in range(3):  # two that go on for ever used to be the end
        with pytest.raises(ConstraintError, match=r"longer than 1.5 s or more than 512 MB to be"):
            shared.matcher(ENDLESS)
    check_good(tokenizer, shared)


def test_a_token_has_a_limit_of_time(tokenizer: Tokenizer, shared: ConstraintCompiler) -> None:
    """Other answers go on while one computes a mask for ever; it ends by itself."""
    late, good = shared.matcher(LATE), shared.matcher(GOOD)
    for _ in range(8):
        late.accept(tokenizer.encode("x")[0])
        assert allowed(late, tokenizer)
    late.accept(tokenizer.encode("x")[0])
    started = time.monotonic()
    walk(tokenizer, good, 3)
    with pytest.raises(ConstraintError, match=r"longer than 0.25 s or more than 512 MB for a"):
        walk(tokenizer, late, 3)
    assert time.monotonic() - started < constraint_starter._GIVEN_UP
    with pytest.raises(ConstraintError):  # the answer is lost
        allowed(late, tokenizer)
    check_good(tokenizer, shared)
    assert allowed(shared.matcher(LATE), tokenizer)  # in a process of its own


def test_memory_has_a_limit(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        limited(monkeypatch, memory_bytes=96 << 20, compile_seconds=60.0),
        ConstraintCompiler(tokenizer) as compiler,
    ):
        check_good(tokenizer, compiler)
        with pytest.raises(ConstraintError, match=r"more than 96 MB"):
            compiler.matcher(ENDLESS)
        check_good(tokenizer, compiler)


def test_what_is_kept_has_a_limit(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    # the good one takes 3 to 4 MB, now and then a little more, the large one 8 to 12
    with limited(monkeypatch, kept_bytes=6 << 20), ConstraintCompiler(tokenizer) as compiler:
        check_good(tokenizer, compiler)
        with pytest.raises(ConstraintError, match=r"takes more than 6 MB"):
            compiler.matcher(LARGE["enum"]())
        check_good(tokenizer, compiler)


def test_an_answer_has_a_limit_of_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        limited(monkeypatch, step_seconds=0.0, answer_seconds=0.02),
        ConstraintCompiler(tokenizer) as compiler,
    ):
        matcher = compiler.matcher(Constraint.regex("[ab]*"))
        with pytest.raises(ConstraintError, match="tokens takes too long"):
            walk(tokenizer, matcher, 100_000)
        again = compiler.matcher(Constraint.regex("[ab]*"))  # each answer has a time of its own
        again.accept(tokenizer.encode("a")[0])
        assert allowed(again, tokenizer)


def test_answers_after_one_that_reached_a_limit_begin_anew(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    fuel = {**LIMITS["llguidance"], "max_lexer_states": 100}
    constraint = Constraint.regex("(a|b)*a(a|b){12}")
    with limited(monkeypatch, llguidance=fuel), ConstraintCompiler(tokenizer) as compiler:
        for _ in range(3):
            matcher = compiler.matcher(constraint)
            assert allowed(matcher, tokenizer)
            with pytest.raises(ConstraintError, match="too many states"):
                walk(tokenizer, matcher, 500, chance)


# ---- many at once --------------------------------------------------------------------------------


def test_many_clients_at_once(tokenizer: Tokenizer, shared: ConstraintCompiler) -> None:
    """Those with hostile constraints get an error, and a good one among them its matcher."""
    check_good(tokenizer, shared)
    ends: list[type[BaseException] | None] = []

    def ask() -> None:
        try:
            shared.matcher(ENDLESS)
        except ModelError as error:
            ends.append(type(error))
        else:
            ends.append(None)

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads):
        check_good(tokenizer, shared)  # compiled already: it does not wait
        answered += 1
    assert answered > len(threads)  # each in its turn would come after one of them
    assert set(ends) == {ProcessGoneError, BusyError}
    assert len(ends) == 24
    other = Constraint.json_schema({"type": "object", "title": "another"})
    assert allowed(shared.matcher(other), tokenizer)


def test_a_full_queue(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.matcher(GOOD)
    for _ in range(matcher_module._AT_ONCE):
        compiler._turns.acquire()
    with pytest.raises(BusyError, match="too many constraints are being compiled: try again"):
        compiler.matcher(Constraint.regex("a"))  # it has waited
    compiler._waiting = matcher_module._QUEUE
    monkeypatch.setattr(matcher_module, "_WAIT", PATIENCE)
    started = time.monotonic()
    with pytest.raises(BusyError) as caught:
        compiler.matcher(Constraint.regex("a"))
    assert time.monotonic() - started < matcher_module._WAIT
    assert caught.value.retry_after == 1
    check_good(tokenizer, compiler)  # compiled already


def test_equal_constraints_are_compiled_once(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []
    real = compiler._starter.start

    def counted() -> Any:
        starts.append(1)
        return real()

    monkeypatch.setattr(compiler._starter, "start", counted)
    threads = [threading.Thread(target=compiler.matcher, args=(GOOD,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(starts) <= matcher_module._AT_ONCE


def test_constraints_of_answers_have_a_limit(
    tokenizer: Tokenizer, compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "_MOST", 4)
    monkeypatch.setattr(matcher_module, "_KEPT", 2)
    matchers = [compiler.matcher(Constraint.regex(f"a{i}")) for i in range(4)]
    with pytest.raises(BusyError, match="4 different constraints: try again"):
        compiler.matcher(Constraint.regex("b"))
    assert compiler.matcher(Constraint.regex("a1"))  # one of them
    matchers.pop()
    assert allowed(compiler.matcher(Constraint.regex("b")), tokenizer)
    matchers.clear()
    for i in range(9):
        compiler.matcher(Constraint.regex(f"c{i}"))
    assert len(compiler._compiled) <= 3
    assert len(compiler._processes) <= 3
    assert Constraint.regex("c8") in compiler._compiled
    assert Constraint.regex("c0") not in compiler._compiled


def test_other_threads_go_on_while_a_constraint_is_compiled(shared: ConstraintCompiler) -> None:
    ranges = [{"type": "integer", "minimum": i * 7919, "maximum": 10**15 + i} for i in range(300)]
    work = threading.Thread(
        target=lambda: shared.matcher(Constraint.json_schema({"prefixItems": ranges}))
    )
    work.start()
    turns = 0
    while work.is_alive():
        turns += 1
    assert turns > 1000


def test_answers_of_a_constraint_in_many_threads(
    tokenizer: Tokenizer, shared: ConstraintCompiler
) -> None:
    """They share a process; each has its own replies."""
    failures = []

    def answer(number: int) -> None:
        text = f"{number}" * (50 + number)
        try:
            matcher = shared.matcher(Constraint.regex("0+|1+|2+|3+|4+|5+"))
            for char in text:
                (token,) = tokenizer.encode(char)
                matcher.accept(token)
                found = {tokenizer.token_text(t) for t in allowed(matcher, tokenizer)}
                assert {char} <= found
                assert not found & set("012345") - {char}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_replies_to_answers_that_are_over_are_dropped(
    tokenizer: Tokenizer, shared: ConstraintCompiler
) -> None:
    constraint = Constraint.regex("[ab]*")
    lasting = shared.matcher(constraint)
    process = lasting._process
    for _ in range(500):  # more masks than the socket holds
        short = shared.matcher(constraint)
        short.accept(tokenizer.encode("a")[0])
        del short
    for _ in range(3):
        lasting.accept(tokenizer.encode("b")[0])
        assert allowed(lasting, tokenizer)
    assert process._replies == {}
    assert len(process._used) == 2  # this answer, and the process itself


# ---- processes -----------------------------------------------------------------------------------

forks = pytest.mark.skipif(not (HAS_PROC and constraint_starter._CAN_FORK), reason="Linux")


@forks
def test_a_process_that_is_killed_while_it_compiles(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    check_good(tokenizer, compiler)
    source = source_pid(compiler)

    def kill() -> None:
        time.sleep(0.4)
        killed = children(source)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not killed & children(source))

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ConstraintError, match="to be compiled"):
        compiler.matcher(ENDLESS)
    killer.join()
    check_good(tokenizer, compiler)  # its process was killed, too
    assert source_pid(compiler) == source


@forks
def test_a_process_that_is_killed_while_an_answer_goes_on(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    matcher = compiler.matcher(GOOD)
    killed = children(source_pid(compiler))
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not killed & children(source_pid(compiler)))
    with pytest.raises(ConstraintError):
        walk(tokenizer, matcher, 3)
    check_good(tokenizer, compiler)


@forks
def test_the_process_that_forks_is_killed(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    matcher = compiler.matcher(GOOD)
    before = source_pid(compiler)
    os.kill(before, signal.SIGKILL)
    walk(tokenizer, matcher, 3)  # what was forked goes on
    for number in range(3):
        assert allowed(compiler.matcher(Constraint.regex(f"x{number}")), tokenizer)
    assert source_pid(compiler) != before


@forks
def test_a_process_that_is_stopped_is_given_up(tokenizer: Tokenizer) -> None:
    with ConstraintCompiler(tokenizer) as compiler:
        matcher = compiler.matcher(GOOD)
        matcher._process._pipe._socket.settimeout(1.0)  # type: ignore[attr-defined]
        stopped = min(children(source_pid(compiler)))  # the other is ahead
        os.kill(stopped, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(ConstraintError):
                walk(tokenizer, matcher, 3)
            assert time.monotonic() - started > 0.9
            check_good(tokenizer, compiler)
        finally:
            os.kill(stopped, signal.SIGCONT)


@forks
def test_the_processes_are_confined(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    matcher = compiler.matcher(GOOD)
    pids = children(source_pid(compiler))
    assert pids
    for pid in pids:
        status = Path(f"/proc/{pid}/status")
        wait_for(lambda status=status: "NoNewPrivs:\t1" in status.read_text())  # type: ignore[misc]
        if os.uname().machine in ("x86_64", "aarch64"):
            wait_for(lambda status=status: "Seccomp:\t2" in status.read_text())  # type: ignore[misc]
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        line = next(line for line in limits if line.startswith("Max address space"))
        assert line.split()[3] == str(512 << 20)
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
        assert os.getpgid(pid) != os.getpgid(0)  # no Ctrl-C
    assert matcher.is_done is False


@forks
def test_closing_ends_the_processes(tokenizer: Tokenizer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ConstraintCompiler(tokenizer) as compiler:
        matcher = compiler.matcher(GOOD)
        pids = {source_pid(compiler), *children(source_pid(compiler))}
        with pytest.raises(ConstraintError):
            compiler.matcher(ENDLESS)
    compiler.close()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with pytest.raises(ConstraintError):
        walk(tokenizer, matcher, 1)
    del matcher, compiler
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_fork(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: each constraint starts a process of its own."""
    monkeypatch.setattr(constraint_starter, "_CAN_FORK", False)
    with ConstraintCompiler(tokenizer) as compiler:
        check_good(tokenizer, compiler)
        with pytest.raises(ConstraintError, match="to be compiled"):
            compiler.matcher(ENDLESS)
        late = compiler.matcher(LATE)
        with pytest.raises(ConstraintError, match="for a token"):
            walk(tokenizer, late, 12)
        check_good(tokenizer, compiler)


def test_processes_that_do_not_start(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = constraint_starter._settings(tokenizer)
    monkeypatch.setattr(
        constraint_starter, "_settings", lambda _: settings | {"ends": [tokenizer.vocab_size + 5]}
    )
    with (
        ConstraintCompiler(tokenizer) as compiler,
        pytest.raises(ModelError, match="constrained output: "),
    ):
        compiler.matcher(GOOD)
    monkeypatch.undo()
    with ConstraintCompiler(tokenizer) as compiler:
        check_good(tokenizer, compiler)


def test_an_interrupt_while_a_constraint_is_compiled(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    compiler.matcher(GOOD)

    def interrupt(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def compile_for(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        compiler.matcher(ENDLESS)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(matcher_module._AT_ONCE + 1):  # a turn that was lost would be missed
            with pytest.raises(KeyboardInterrupt):
                compile_for(0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert allowed(compiler.matcher(Constraint.regex("a")), tokenizer)


# ---- the worker ----------------------------------------------------------------------------------


class Panic(BaseException):
    """As PyO3 raises it."""


@pytest.mark.parametrize("failure", [Panic("index out\nof range"), ValueError("no"), MemoryError()])
def test_failures_of_the_library_are_replies(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    monkeypatch.setattr(constraint_worker, "_limit_time", lambda seconds: None)

    def fail(grammar: str) -> Any:
        raise failure

    requests = [
        HEADER.pack(COMPILE, 0, 1) + b"a",
        HEADER.pack(STEP, 7, 1),  # of a constraint that was never compiled
        HEADER.pack(FOLLOW, 7, DRAFT.size) + DRAFT.pack(3),
        HEADER.pack(STEP, 8, 1)[:3],  # the parent is gone
    ]
    replies = io.BytesIO()
    settings = {"limits": LIMITS, "lengths": [1] * 40, "ends": [0]}
    follower = constraint_worker._Follower(fail, settings, {})
    follower.run(io.BytesIO(b"".join(requests)), replies)
    replies.seek(HEADER.size)  # the first says that it is ready
    read = []
    while header := replies.read(HEADER.size):
        result, number, size = HEADER.unpack(header)
        read.append((result, number, replies.read(size).decode()))
    assert [(result, number) for result, number, _ in read] == [(FAILED, n) for n in (0, 7, 7)]
    assert read[0][2] == str(failure)


def test_answers_that_end_before_a_token_leave_nothing(shared: ConstraintCompiler) -> None:
    """A check of a constraint is one of them."""
    shared.matcher(GOOD)
    tracemalloc.start()
    try:
        for _ in range(3_000):
            shared.matcher(GOOD)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 50_000
