"""The time to the first token: kernels, weights, and a whole process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from urdir.driver.device import Device
from urdir.driver.parallel import in_threads
from urdir.model.engine.engine import Engine
from urdir.model.engine.options import chosen_context
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.errors import ModelError
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.files.demo import DEMO
from urdir.model.measure.graphs import time_graphs
from urdir.model.measure.model_kernels import model_kernels
from urdir.model.text.tokenizer import Tokenizer
from urdir.ptxgen.render.jinja import environment, write_modules

if TYPE_CHECKING:
    from urdir.ptxgen.spec import KernelSpec

_Value = TypeVar("_Value")

#: The parts of `Engine.seconds` with rows of their own, as they are called there.
_PARTS = {
    "driver": "driver loaded",
    "file": "file read and checked",
    "device": "device opened",
    "tokenizer": "tokeniser built",
    "graphs": "first graphs recorded",
}
_PROMPT_TOKENS = 8
#: Users of a service whose graphs are recorded.
_USERS = 64
_MODULES = (
    "cuda.bindings.driver",
    "urdir.driver.device",
    "urdir.model.cli",
    "urdir.model.commands.run",
    "urdir.model.engine.generate",
    "urdir.model.engine.session",
    "urdir.model.text.tokenizer_models",
)


@dataclass(frozen=True, slots=True)
class StartupRow:
    """One phase: ``value`` in ``unit``; what it is about in words."""

    phase: str
    value: float
    unit: str
    note: str


def bench_startup(
    source: str | SyntheticModel | None, device_name: str, cache_folder: Path | None = None
) -> Iterator[StartupRow]:
    """Time the phases of starting with a model (None: the demo model), each as soon as it is known.

    ``cache_folder`` has kernels that loading the model itself needs.

    Rendering: every kernel of every step that a session of default context may launch, by a process
    that finds its templates compiled. Compiling templates: all of them, as the build of a wheel
    does; in a checkout the first process compiles those it needs. Compiling PTX: ``cold`` is all of
    it with nothing cached, in threads; ``warm`` loads it from a folder of cubins. Opening runs its
    parts side by side: their sum exceeds the row of all. Loading is from the file in the page cache
    to weights that are ready on the device. The process is ``urdir run`` from its start to its
    first byte of output, the second time in a row, so that file and kernels are cached; left out
    where ``source`` is synthetic or has no vocabulary. It loads the driver and opens the
    device while it imports. Raises ModelError when that run fails.
    """
    with Engine.open(
        source, device=device_name, cache_folder=cache_folder
    ) as engine:  # also reads the file
        device = engine.device
        specs = _specs(engine)
        texts = yield from _render(specs, device.native_target)
        compile_s = _compile_cold(device, specs, texts)
        yield StartupRow("PTX compiled, cold", 1e3 * compile_s, "ms", f"{len(specs)} kernels")
        name, text = device.name, Tokenizer.is_there(engine.file)
    yield StartupRow("cubins loaded, warm", 1e3 * _load_warm(name, specs), "ms", "from a folder")
    yield from _open(source, device_name, cache_folder, text)
    if not device.is_emulated:  # whose steps take longer than their graphs
        for part, seconds, note in time_graphs(source, device_name, _USERS):
            yield StartupRow(part, 1e3 * seconds, "ms", note)
    if text and not isinstance(source, SyntheticModel):
        path = str(source or DEMO)
        _first_output_s(path, name)
        seconds = _first_output_s(path, name)
        yield StartupRow("process to first token", seconds, "s", "urdir run -n 1")


def _open(
    source: str | SyntheticModel | None, device_name: str, cache_folder: Path | None, text: bool
) -> list[StartupRow]:
    """What opening takes, part by part, when all modules are imported."""
    start = time.perf_counter()
    with Engine.opening(
        source, device=device_name, cache_folder=cache_folder, text=text
    ) as loading:
        loading.prepare(Request(prompt=(0,) * _PROMPT_TOKENS, settings=GREEDY))
        engine = Engine(loading)
    with engine:
        total = time.perf_counter() - start
        if text:
            _ = engine.tokenizer
        seconds, nbytes = engine.seconds, engine.weights.nbytes
    note = f"{nbytes / 1e9:.2f} GB in {seconds['weights']:.2f} s"
    return [
        StartupRow("modules imported", 1e3 * _import_s(), "ms", "Python started, ended"),
        *(
            StartupRow(_PARTS[part], 1e3 * seconds[part], "ms", "beside others")
            for part in _PARTS
            if part in seconds
        ),
        StartupRow("weights loaded", nbytes / seconds["weights"] / 1e9, "GB/s", note),
        StartupRow("opened, all of that", 1e3 * total, "ms", "modules imported before"),
    ]


def _import_s() -> float:
    """Seconds of a process that imports what `urdir run` does for a GPU."""
    command = [sys.executable, "-c", f"import {', '.join(_MODULES)}"]
    return _timed(lambda: subprocess.run(command, check=True))[0]


def _specs(engine: Engine) -> Sequence[KernelSpec]:
    device = engine.device
    context = chosen_context(engine.config, None)
    sm_count = device.properties.sm_count
    kernels = model_kernels(engine.file, engine.config, context, device.native_target, sm_count)
    return [kernel.spec for kernel in kernels]


def _render(specs: Sequence[KernelSpec], target: str) -> Generator[StartupRow, None, Sequence[str]]:
    """All texts, and the time that a process takes to render them, and to compile templates."""
    _render_afresh(specs, target)  # compiles the templates that are not compiled yet
    seconds, texts = _render_afresh(specs, target)
    yield StartupRow("PTX rendered", 1e3 * seconds, "ms", f"{len(specs)} kernels")
    with tempfile.TemporaryDirectory() as folder:
        modules = Path(folder) / "compiled"
        compile_s, count = _timed(lambda: write_modules(modules))
    yield StartupRow("templates compiled", 1e3 * compile_s, "ms", f"{count} templates")
    return texts


def _render_afresh(specs: Sequence[KernelSpec], target: str) -> tuple[float, list[str]]:
    """Seconds to render all texts by a process that has rendered nothing so far; the texts."""
    environment.cache_clear()
    fresh = [replace(spec) for spec in specs]  # type: ignore[type-var]
    return _timed(lambda: [spec.ptx(target) for spec in fresh])


def _compile_cold(device: Device, specs: Sequence[KernelSpec], texts: Sequence[str]) -> float:
    """Seconds to compile all texts, in threads; each is unlike any that the driver has cached."""
    salt = f"\n// {time.time_ns()}\n"
    pairs = [(spec.name, text + salt) for spec, text in zip(specs, texts, strict=True)]
    return _timed(lambda: in_threads(lambda pair: device.compile(pair[1], pair[0]), pairs))[0]


def _load_warm(device_name: str, specs: Sequence[KernelSpec]) -> float:
    """Seconds to load all kernels on a device whose folder of cubins has them."""
    with tempfile.TemporaryDirectory() as folder:
        _load_all(device_name, specs, Path(folder))  # fills the folder
        return _load_all(device_name, specs, Path(folder))


def _load_all(device_name: str, specs: Sequence[KernelSpec], folder: Path) -> float:
    with Device.open(device_name, cache_folder=folder) as device:
        return _timed(lambda: device.load_all(specs))[0]


def _first_output_s(model: str, device_name: str) -> float:
    """Seconds from the start of an `urdir run` to the first byte that it prints."""
    command = [sys.executable, "-m", "urdir.model", "run", "-m", model, "--device", device_name]
    command += ["--raw", "-p", "Once upon a time", "-n", "1", "--temp", "0", "--ignore-eos"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        _, errors = process.communicate()
    if process.returncode or not first:
        raise ModelError(f"{' '.join(command)} failed:\n{errors.decode(errors='replace')}")
    return seconds


def _timed(work: Callable[[], _Value]) -> tuple[float, _Value]:
    start = time.perf_counter()
    value = work()
    return time.perf_counter() - start, value
