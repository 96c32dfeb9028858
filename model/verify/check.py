"""Does everything work on this device? Every kernel's examples, then the plans of the demo model.

`urdir check` prints what is found here: the first thing to run on a new GPU, driver or machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from urdir.driver import execute
from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.device_owner import DeviceOwner
from urdir.driver.diff import Difference, trace
from urdir.driver.harness import run_kernel, time_kernel
from urdir.driver.stream import Stream
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.logits import logits_after
from urdir.model.engine.realizar.eager import EagerSteps
from urdir.model.engine.requests.request import Request
from urdir.model.engine.runner import Observer
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import Logits, relative_rms
from urdir.ptxgen.catalog import kernel as kernel_called
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.spec import KernelSpec

#: What the demo model is given, and how many tokens it then decodes.
PROMPT = "Once upon a time, in a tiny house,"
STEPS = 3
CONTEXT = 64
#: How far the GPU's logits may be from the emulator's or several GPUs' from one's, as relative RMS.
#: Both round activations to f16 and values of the cache, and a sum added in another order may round
#: the other way.
ROUNDING_TOLERANCE = 2e-3

OpenEngine = Callable[[str], Engine]
#: Opens the demo model on several devices of a kind: this many, or those with these ordinals.
OpenRanks = Callable[[str, int | Sequence[int]], Engine]


class CheckError(ModelError):
    """Something computed on the device is wrong: the message says what, and by how much."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One thing that was checked: an example of a kernel, or (``example`` "") a plan.

    ``error`` is the largest deviation and ``tolerance`` what is allowed there, both in the units of
    the output; ``microseconds`` and ``gb_per_s`` are those of one launch, measured on GPUs only.
    ``failure`` and ``skipped`` say why it is not "ok"; nothing is measured then.
    """

    name: str
    example: str = ""
    error: float | None = None
    tolerance: float | None = None
    microseconds: float | None = None
    gb_per_s: float | None = None
    failure: str = ""
    skipped: str = ""

    @property
    def status(self) -> str:
        """ "ok", "FAILED" or "skipped"."""
        return "FAILED" if self.failure else "skipped" if self.skipped else "ok"


def _reported(exc: Exception) -> str:
    """What a failed check says: of errors that are not ours, the type as well."""
    ours = type(exc).__module__.startswith("urdir.")
    return str(exc) if ours else f"{type(exc).__name__}: {exc}"


# ---- kernels -------------------------------------------------------------------------------------


def select_kernels(names: Sequence[str] = ()) -> tuple[type[KernelSpec], ...]:
    """The kernels of the given names, all by default. Raises PtxgenError for an unknown name."""
    return tuple(map(kernel_called, names)) if names else tuple(kernels().values())


def check_kernel_examples(owner: DeviceOwner, kind: type[KernelSpec]) -> Iterator[CheckRow]:
    """One row for every example of a kernel; what goes wrong is in the row, nothing is raised."""
    try:
        examples = kind.examples()
    except Exception as exc:
        yield CheckRow(kind.name, "examples()", failure=_reported(exc))
        return
    for spec in examples.values():
        target = owner.device.native_target
        if spec.target_on(target) is None:
            reason = f"is for {', '.join(spec.targets)}, the device is {target}"
            yield CheckRow(kind.name, str(spec), skipped=reason)
            continue
        try:
            yield _check_example(owner.device, spec)
        except Exception as exc:  # whatever one kernel does, the others are still checked
            yield CheckRow(kind.name, str(spec), failure=_reported(exc))


def _check_example(device: Device, spec: KernelSpec) -> CheckRow:
    inputs = spec.make_inputs(np.random.default_rng(0))
    outputs = run_kernel(device, spec, inputs)
    worst = max(compare(spec, outputs, spec.reference(**inputs)), key=lambda d: d.ratio)
    microseconds = gb_per_s = None
    if not device.is_emulated:
        microseconds = 1e3 * time_kernel(device, spec, inputs)
        gb_per_s = spec.bytes_moved() / microseconds / 1e3 if microseconds else None
    return CheckRow(spec.name, str(spec), worst.error, worst.bound, microseconds, gb_per_s)


# ---- plans ---------------------------------------------------------------------------------------


def check_plans(open_engine: OpenEngine, device_name: str) -> Iterator[CheckRow]:
    """The steps of the demo model: launch by launch, replayed, and on a GPU beside the emulator.

    ``open_engine`` opens that model on a device of a given name, with a context of `CONTEXT`
    tokens. Nothing is raised: what goes wrong is in the rows.
    """
    for name, check in _PLAN_CHECKS.items():
        if check is _check_emulator and device_name.startswith("emulator"):
            yield CheckRow(name, skipped="there is no GPU")
            continue
        try:
            yield check(name, device_name, open_engine)
        except Exception as exc:
            yield CheckRow(name, failure=_reported(exc))


class _Tracing:
    """Runs steps launch by launch and keeps the output that is closest to its bound, or beyond."""

    def __init__(self) -> None:
        self.worst: Difference | None = None

    def run(self, bound: execute.BoundPlan, stream: Stream) -> None:
        for found in trace(bound, bound.device, stream):
            if self.worst is None or found.deviation.ratio > self.worst.deviation.ratio:
                self.worst = found


class _Eager:
    def run(self, bound: execute.BoundPlan, stream: Stream) -> None:
        execute.run(bound, bound.device, stream)


def _check_launches(name: str, device_name: str, open_engine: OpenEngine) -> CheckRow:
    """Every launch of a prompt step and of a decode step, checked on the inputs that it found."""
    tracing = _Tracing()
    with open_engine(device_name) as engine, _opened(engine, tracing) as session:
        _answer(session, _prompt(engine), 2)
    assert tracing.worst is not None
    deviation = tracing.worst.deviation
    if not deviation.ok:
        raise CheckError(str(tracing.worst))
    return CheckRow(name, error=deviation.error, tolerance=deviation.bound)


def _check_replay(name: str, device_name: str, open_engine: OpenEngine) -> CheckRow:
    """Recorded graphs leave the bits that the same launches leave, made one by one."""
    with open_engine(device_name) as engine:
        (replayed, logits), (eager, expected) = (_decode(engine, o) for o in (None, _Eager()))
    if replayed != eager:
        raise CheckError(f"tokens {replayed} replayed, {eager} launch by launch")
    wrong = np.flatnonzero(logits.view(np.uint32) != expected.view(np.uint32))
    if wrong.size:
        raise CheckError(
            f"{wrong.size:,} of {logits.size:,} logits differ between replay and launch by launch, "
            f"the first is that of token {wrong[0] % logits.shape[1]}"
        )
    return CheckRow(name, error=0.0, tolerance=0.0)


def _check_emulator(name: str, device_name: str, open_engine: OpenEngine) -> CheckRow:
    """The same steps on the GPU and on an emulator that poses as it."""
    results = []
    with open_engine(device_name) as engine:
        results.append(_decode(engine))
        twin = f"emulator:{engine.device.native_target}"
    with open_engine(twin) as engine:
        results.append(_decode(engine))
    (tokens, logits), (expected_tokens, expected) = results
    error = relative_rms(logits, expected)
    if tokens != expected_tokens or not error <= ROUNDING_TOLERANCE:
        raise CheckError(
            f"the GPU decodes {tokens}, the emulator {expected_tokens}; their logits differ by "
            f"{error:.2e} (relative RMS), allowed {ROUNDING_TOLERANCE:.0e}"
        )
    return CheckRow(name, error=error, tolerance=ROUNDING_TOLERANCE)


_PLAN_CHECKS: dict[str, Callable[[str, str, OpenEngine], CheckRow]] = {
    "launches of a step agree with their references": _check_launches,
    "replay equals eager": _check_replay,
    "emulator equals GPU": _check_emulator,
}


def check_ranks(open_engine: OpenRanks, kind: str, gpus: int | Sequence[int]) -> CheckRow:
    """The demo model on several devices that share it, beside the first of them alone: the same
    tokens, and the same bits when it runs again. What goes wrong is in the row."""
    ordinals = range(gpus) if isinstance(gpus, int) else gpus
    name = f"{len(ordinals)} GPUs agree with one"
    try:
        return _check_ranks(name, open_engine, kind, ordinals)
    except Exception as exc:
        return CheckRow(name, failure=_reported(exc))


def _check_ranks(name: str, open_engine: OpenRanks, kind: str, ordinals: Sequence[int]) -> CheckRow:
    with open_engine(kind, ordinals[:1]) as engine:
        expected_tokens, expected = _decode_in(engine, engine.session)
    with open_engine(kind, ordinals) as engine:
        tokens, logits = _decode_in(engine, engine.session)
        EagerSteps(engine.session).close()  # nothing is left in the cache
        again, same = _decode_in(engine, engine.session)
    if again != tokens or not np.array_equal(logits, same):
        raise CheckError("the same prompt gives other logits when it runs again")
    error = relative_rms(logits, expected)
    if tokens != expected_tokens or not error <= ROUNDING_TOLERANCE:
        raise CheckError(
            f"GPUs {', '.join(map(str, ordinals))} decode {tokens}, GPU {ordinals[0]} alone "
            f"{expected_tokens}; their logits differ by {error:.2e} (relative RMS), allowed "
            f"{ROUNDING_TOLERANCE:.0e}"
        )
    return CheckRow(name, error=error, tolerance=ROUNDING_TOLERANCE)


def _decode(engine: Engine, observer: Observer | None = None) -> tuple[list[int], Logits]:
    """Answer the prompt greedily: the tokens, and the logits (STEPS, n_vocab) of each."""
    with _opened(engine, observer) as session:
        return _decode_in(engine, session)


def _decode_in(engine: Engine, session: Session) -> tuple[list[int], Logits]:
    """The same in a session that nothing else uses: the device chooses the tokens, then these are
    given, and the logits come back."""
    prompt = _prompt(engine)
    tokens = _answer(session, prompt, STEPS)
    return tokens, np.stack([*logits_after(session, prompt, tokens[:-1])])


def _opened(engine: Engine, observer: Observer | None) -> Session:
    settings = SessionSettings(CONTEXT)
    return Session(engine.device, engine.weights, settings, observer=observer)


def _prompt(engine: Engine) -> list[int]:
    return engine.tokenizer.encode(PROMPT, parse_special=True)


def _answer(session: Session, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens of a greedy answer."""
    request = Request(prompt=tuple(prompt), settings=GREEDY, limit=count)
    generation = Generation(session, None, request)
    for _ in generation.pieces():
        pass
    return generation.tokens
