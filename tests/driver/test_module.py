"""Loading kernels: compile errors, parameter agreement, caches in memory and on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import PATIENCE, wait_for
from urdir.driver.apart import Compilers, compilers_for
from urdir.driver.cache import CacheWarning, CubinCache
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, LifetimeError, OutOfMemoryError, PtxLoadError, check
from urdir.driver.kernel import Kernel
from urdir.driver.launch import launch, pack
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import Access, LaunchShape, Param

Make = Callable[..., Any]
Start = Callable[..., Any]
N = 1000


def run_ramp(device: Device, kernel: Any) -> None:
    """Launch the test kernel on fresh buffers and check what it writes."""
    with (
        device.create_stream() as stream,
        device.allocate(4 * N, "x") as x,
        device.allocate(4 * N, "y") as y,
    ):
        x.fill(0)
        launch(device.load(kernel), pack(kernel, {"x": x, "n": N, "y": y, "scale": 1.0}), stream)
        assert np.array_equal(y.download("f4"), np.arange(N, dtype=np.float32))


def test_resources_of_a_loaded_kernel(device: Device, make_kernel: Make) -> None:
    loaded = device.load(make_kernel())
    assert 0 < loaded.resources.registers <= 255
    assert loaded.resources.local_bytes == 0
    assert loaded.resources.shared_bytes == 0
    assert loaded.resources.max_threads == 1024


@pytest.mark.parametrize("prefers_shared", [False, True])
def test_a_kernel_takes_the_most_shared_memory_where_it_prefers_that(
    device: Device, make_kernel: Make, prefers_shared: bool
) -> None:
    """Kernels of different splits would not run on an SM together; -1 leaves it to the driver."""
    shape = LaunchShape((1, 1, 1), (128, 1, 1), prefers_shared=prefers_shared)
    kernel = make_kernel(launch_shape=shape, spec_key=f"split {prefers_shared}")
    loaded, api = device.load(kernel), device.api
    key = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    percent = check(api, api.cuFuncGetAttribute(key, loaded.function), "cuFuncGetAttribute")
    assert int(percent) == (100 if prefers_shared else -1)


@pytest.mark.parametrize("spec", Normalise.examples().values(), ids=str)
def test_a_spec_loads_and_computes(device: Device, spec: Normalise) -> None:
    inputs = spec.make_inputs(np.random.default_rng(3))
    sizes = {p.name: spec.nbytes(p) for p in spec.params}
    with device.arena(sizes, "args") as arena, device.create_stream() as stream:
        for name, array in inputs.items():
            arena[name].upload(array)
        launch(device.load(spec), pack(spec, arena), stream)
        out = spec.param("y")
        y = arena["y"].download(out.numpy_dtype, spec.shape_of(out))
    expected = spec.reference(**inputs)["y"]
    assert np.abs(y - expected).max() <= spec.tolerance.rtol * np.abs(expected).max()


def test_equal_keys_share_one_loaded_kernel(device: Device, make_kernel: Make) -> None:
    first, second = make_kernel(), make_kernel()
    loaded = device.load(first)
    assert device.load(second) is loaded
    assert (first.rendered, second.rendered) == (([device.native_target],), ([],))
    assert device.load(make_kernel(spec_key="other")) is not loaded


def test_closed_kernel_is_loaded_again(device: Device, make_kernel: Make) -> None:
    loaded = device.load(make_kernel())
    loaded.close()
    loaded.close()
    with pytest.raises(LifetimeError, match="kernel 'ramp' was used after it was closed"):
        _ = loaded.handle
    assert device.load(make_kernel()) is not loaded
    run_ramp(device, make_kernel())


def test_threads_load_a_kernel_once(device: Device, make_kernel: Make) -> None:
    kernel = make_kernel()
    loaded: list[Any] = []
    threads = [
        threading.Thread(target=lambda: loaded.append(device.load(kernel))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 8
    assert len({id(item) for item in loaded}) == 1
    assert len(kernel.rendered[0]) == 1


def test_several_kernels_are_loaded_at_once(
    device: Device, make_kernel: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(4))
    # Two with one key, and one that is there already.
    kernels = [make_kernel(spec_key=f"ramp-{i % 9}") for i in range(10)]
    there = device.load(make_kernel(spec_key="ramp-5"))
    loaded = device.load_all(kernels)
    assert [item.kernel for item in loaded[:5]] == kernels[:5]
    assert loaded[5] is there
    assert loaded[9] is loaded[0]
    assert [len(kernel.rendered[0]) for kernel in kernels] == [1, 1, 1, 1, 1, 0, 1, 1, 1, 0]
    assert device.load_all(kernels) == loaded
    for kernel in kernels:
        run_ramp(device, kernel)
    device.close()
    assert all(item.closed for item in loaded)


def test_one_of_several_that_does_not_compile_is_named(
    device: Device, make_kernel: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(2))
    good = [make_kernel(spec_key=f"ramp-{i}") for i in range(2)]
    text = good[0].text.replace("ramp", "bad").replace("add.u64", "add.u65")
    bad = make_kernel(spec_key="bad", name="bad", text=text)
    with pytest.raises(PtxLoadError, match="compiling kernel bad"):
        device.load_all([*good, bad])
    assert device.load(good[0]) is device.load_all(good)[0]
    assert [len(kernel.rendered[0]) for kernel in good] == [1, 1]  # what compiled is kept


def test_cached_kernels_are_loaded_without_their_text(
    device_name: str, make_kernel: Make, tmp_path: Path
) -> None:
    for rendered in (1, 0):
        kernels = [make_kernel(spec_key=f"ramp-{i}") for i in range(3)]
        with Device.open(device_name, cache_folder=tmp_path) as device:
            device.load_all(kernels)
            run_ramp(device, kernels[2])
        assert [len(kernel.rendered[0]) for kernel in kernels] == [rendered] * 3


def test_ptx_error_shows_log_lines_and_dump(device: Device, make_kernel: Make) -> None:
    good = make_kernel().text
    text = good.replace("add.u64 %y, %y, %offset;", "add.u64 %y, %y, %nowhere;")
    line = text[: text.index("%nowhere")].count("\n") + 1
    with pytest.raises(PtxLoadError) as caught:
        device.load(make_kernel(text=text, spec_key="bad"))
    error = caught.value
    assert f"> {line:4} |     add.u64 %y, %y, %nowhere;" in str(error)
    assert f"  {line - 2:4} | " in str(error)
    assert f"  {line + 2:4} | " in str(error)
    assert "compiling kernel ramp: CUDA_ERROR_INVALID_PTX" in str(error)
    assert error.log
    assert error.log in str(error)
    assert error.dump is not None
    assert error.dump in str(error)
    dump = Path(error.dump)
    assert dump.read_text() == text
    dump.unlink()
    run_ramp(device, make_kernel())  # the context survives


def test_a_text_that_hands_over_registers_is_loaded_as_it_is(
    device_name: str, make_kernel: Make, tmp_path: Path
) -> None:
    """The linker would ignore that. The text is cached; errors are those of other texts."""
    whole = make_kernel().text + "// setmaxnreg\n"
    for rendered in (1, 0):
        kernel = make_kernel(text=whole)
        with Device.open(device_name, cache_folder=tmp_path) as device:
            run_ramp(device, kernel)
            assert len(kernel.rendered[0]) == rendered
            text = whole.replace("%y, %y, %offset", "%y, %y, %nowhere")
            bad = make_kernel(text=text, spec_key="bad")
            with pytest.raises(PtxLoadError, match=r"> .*add.u64 %y, %y, %nowhere;"):
                device.load(bad)
    (entry,) = tmp_path.glob("*/cubins/*")
    assert entry.read_bytes().startswith(whole.encode())


def test_what_holds_up_launches_is_compiled_apart_once(
    make_kernel: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that hand over registers, where they are new; on a GPU alone."""
    apart: list[list[str]] = []
    monkeypatch.setattr(Compilers, "compile", lambda _, kernels: apart.append([*kernels]))
    whole = make_kernel(text=make_kernel().text + "// setmaxnreg\n", spec_key="whole")
    for is_emulated in (True, False, False):
        folder = tmp_path / str(is_emulated)
        with Device.open("emulator", cache_folder=folder) as device:
            monkeypatch.setattr(device, "is_emulated", is_emulated)
            for kernels in ([make_kernel(), whole], [whole]):
                device.compile_beside(kernels)
                device.load_all(kernels)
            run_ramp(device, whole)
    assert apart == [[whole.key("sm_90a")]]


def test_many_new_kernels_are_compiled_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside launches, where the device is a GPU and has a cache."""
    apart: list[int] = []
    monkeypatch.setattr(Compilers, "compile", lambda _, kernels: apart.append(len(kernels)))
    kernels = [Add(n=256 * n) for n in range(1, 13)]
    for folder, is_emulated in ((tmp_path, True), (tmp_path, False), (None, False)):
        with Device.open("emulator", cache_folder=folder) as device:
            monkeypatch.setattr(device, "is_emulated", is_emulated)
            device.compile_beside(kernels[:8])
            device.compile_beside(kernels)
    assert apart == [12]


def test_other_processes_compile(
    make_kernel: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cubins are loaded here, and what they cannot compile is compiled here."""

    class Local(type(make_kernel())):  # type: ignore[misc]
        """A class that no other process has."""

    cores, kernel, unknown = 4, Add(n=512), Local(**vars(make_kernel()))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    with Device.open("emulator", cache_folder=tmp_path) as device:
        device.begin_compilers()
        monkeypatch.setattr(Add, "ptx", None)  # which is not rendered here
        assert device.has_compilers
        device.compile_beside([kernel])
        (loaded,) = device.load_all([kernel])
        assert loaded.kernel is kernel
        device.compile_beside([unknown])
        device.load(unknown)
        assert len(unknown.rendered[0]) == 1
        device.end_compilers()
        run_ramp(device, unknown)


def test_compilers_start_at_once_where_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they have memory; elsewhere the first kernel starts them."""

    def started(spare: int | None) -> tuple[bool, bool]:
        """Whether there are compilers, and whether they run before any kernel comes."""
        with Device.open("emulator", cache_folder=tmp_path) as device:
            device.begin_compilers(spare)
            compilers = device._modules.compilers
            return compilers is not None, bool(compilers and compilers._processes)

    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(2))  # one process
    assert started(None) == (True, False)
    assert started(1 << 20) == (False, False)
    assert started(1 << 30) == (True, True)
    with Device.open("emulator", cache_folder=tmp_path) as device:
        device.load(Add(n=512))
    assert started(1 << 30) == (False, False)


def test_compilers_import_what_kernels_will_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before one comes; a module that is not there costs nothing."""
    (tmp_path / "is_imported").mkdir()
    (tmp_path / "is_imported" / "__init__.py").touch()
    (tmp_path / "is_imported" / "module.py").write_text(
        "import pathlib; pathlib.Path(__file__).with_name('imported').touch()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cache = tmp_path / "cache"
    modules = ["no.such_module", "is_imported"]
    with Compilers("emulator", cache, None, 2, modules) as compilers:
        compilers.begin()
        wait_for((tmp_path / "is_imported" / "imported").exists)
        assert not compilers._processes
        compilers.begin()
        compilers.fork()
        assert len(compilers._processes) == 2
        assert compilers.compile({"256": Add(n=256)})


def test_compilers_say_that_they_may_soon_have_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they have begun, unless several kernels wait for each."""
    running, released = Compilers._running, threading.Event()

    def found(self: Compilers) -> object:
        assert released.wait(PATIENCE)
        return running(self)

    monkeypatch.setattr(Compilers, "_running", found)
    kernels = {str(n): Add(n=n) for n in range(256, 256 * 8, 256)}
    with Compilers("emulator", tmp_path, None, 1) as compilers:
        compilers.begin()
        assert not compilers.is_short
        compilers.fork()
        assert compilers.is_short
        thread = threading.Thread(target=compilers.compile, args=[kernels])
        thread.start()
        try:
            wait_for(lambda: not compilers.is_short)
        finally:
            released.set()
            thread.join(PATIENCE)
        assert compilers.is_short


def test_compilers_that_have_begun_are_used_or_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin for a GPU for which nothing is compiled, before it is open."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(4))

    def begun(name: str = "auto", folder: Path | None = tmp_path) -> Compilers | None:
        return compilers_for(name, folder)

    assert begun("emulator") is None
    assert begun(folder=None) is None
    with Device.open("emulator", cache_folder=tmp_path) as device:
        for spare in (1 << 20, 1 << 30):
            found = begun()
            assert found is not None
            device.begin_compilers(spare, found)
            assert found._is_closed == (spare < 1 << 29)
        assert device._modules.compilers is found
        assert len(found._processes) == 2  # of three, for which there are cores
    assert found._is_closed
    CubinCache(tmp_path).remember("kernel", "0" * 64)
    assert begun() is None


def children(process: int) -> list[int]:
    """The processes that one has started."""
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def is_running(process: int) -> bool:
    """Whether a process has not ended; it may wait for its parent to hear of that."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="children of processes are files on Linux")
def test_compilers_end_with_what_asks_them(tmp_path: Path) -> None:
    """However that ends."""
    text = (
        "import sys; from pathlib import Path\n"
        "from urdir.driver.apart import Compilers\n"
        "from urdir.ptxgen.kernels.add import Add\n"
        f"compilers = Compilers('emulator', Path({str(tmp_path)!r}), None, 2)\n"
        "assert compilers.compile({'256': Add(n=256)})\n"
        "print(compilers._program.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        found = [program, *children(program)]
        assert len(found) == 3
        assert all(map(is_running, found))
        process.kill()
    wait_for(lambda: not any(map(is_running, found)))


@pytest.mark.skipif(sys.platform != "linux", reason="children of processes are files on Linux")
def test_compilers_that_end_cost_nothing_but_time(tmp_path: Path) -> None:
    kernels = {str(n): Add(n=n) for n in (256, 512, 768)}
    more = {str(n): Add(n=n) for n in (1024, 1280)}
    with Compilers("emulator", tmp_path, None, 2) as compilers:
        assert compilers.compile({"256": kernels["256"]})
        assert compilers._program is not None
        found = children(compilers._program.pid)
        for ended, expected in enumerate((True, False), 1):  # the other one goes on
            os.kill(found.pop(), signal.SIGKILL)
            wait_for(lambda n=ended: sum(of.has_ended for of in compilers._processes) == n)
            assert compilers.compile(kernels if expected else more) is expected
        assert compilers.compile({"256": kernels["256"]})  # it is known
    assert not compilers.compile(kernels)
    with Compilers("no such device", tmp_path, None, 1) as compilers:
        assert not compilers.compile(kernels)
        assert compilers.is_short  # none is left


def test_closing_compilers_ends_all_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, released = threading.Event(), threading.Event()

    def compiled(self: Compilers, kernel: Kernel) -> bool:
        started.set()
        return released.wait(PATIENCE)

    monkeypatch.setattr(Compilers, "_compiled", compiled)
    compilers = Compilers("emulator", tmp_path, None, 1)
    results: list[bool] = []
    kernels = {str(n): Add(n=n) for n in (256, 512)}
    threads = [
        threading.Thread(target=lambda: results.append(compilers.compile(kernels)), daemon=True),
        threading.Thread(target=compilers.close, daemon=True),
    ]
    threads[0].start()
    assert started.wait(PATIENCE)
    threads[1].start()
    while not compilers._threads._shutdown:  # kernels that wait are cancelled
        time.sleep(0.001)
    released.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [False]


def test_new_ptx_version_names_the_driver(emulator: Device, make_kernel: Make) -> None:
    for version, needs in (("9.1", "driver >= 590"), ("11.7", "a newer driver")):
        text = make_kernel().text.replace(".version 6.3", f".version {version}")
        with pytest.raises(PtxLoadError, match=f"PTX {version} needs {needs}: update") as caught:
            emulator.load(make_kernel(text=text, spec_key=version))
        Path(caught.value.dump or "").unlink()


def test_missing_entry(device: Device, make_kernel: Make) -> None:
    with pytest.raises(PtxLoadError, match="the PTX of kernel slope has no entry of that name"):
        device.load(make_kernel(name="slope"))


@pytest.mark.parametrize(
    "params",
    [
        "x:p n:u32 y:p",
        "x:p n:u32 y:p scale:f32 more:u32",
        "x:p n:u64 y:p scale:f32",
        "x:p y:p n:u32 scale:f32",
        "",
    ],
)
def test_spec_and_ptx_must_agree(device: Device, make_kernel: Make, params: str) -> None:
    pairs = [text.split(":") for text in params.split()]
    declared = tuple(
        Param(name, "f32", (N,), Access.IN) if kind == "p" else Param(name, kind)
        for name, kind in pairs
    )
    with pytest.raises(PtxLoadError, match=r"disagree about the parameters .*\(0, 8\), \(8, 4\)"):
        device.load(make_kernel(params=declared))
    run_ramp(device, make_kernel(spec_key="right"))


def test_second_process_skips_rendering(
    device_name: str, make_kernel: Make, tmp_path: Path
) -> None:
    kernels = make_kernel(), make_kernel()
    for kernel in kernels:
        with Device.open(device_name, cache_folder=tmp_path) as device:
            run_ramp(device, kernel)
    assert [len(kernel.rendered[0]) for kernel in kernels] == [1, 0]


@pytest.mark.parametrize("more", ["", "// setmaxnreg\n"])
def test_a_kernel_is_stored_for_other_processes(
    device_name: str, make_kernel: Make, tmp_path: Path, more: str
) -> None:
    """Also one that the driver compiles when it is loaded; it does not stay loaded."""
    text = make_kernel().text + more
    kernel, other = make_kernel(text=text), make_kernel(text=text)
    with Device.open(device_name, cache_folder=tmp_path) as device:
        device.store(kernel)
        assert not device.is_loaded(kernel)
        bad = make_kernel(text=text.replace("%y, %y, %offset", "%y, %y, %no"), spec_key="bad")
        with pytest.raises(PtxLoadError, match="%no"):
            device.store(bad)
    with Device.open(device_name, cache_folder=tmp_path) as device:
        run_ramp(device, other)
    assert [len(each.rendered[0]) for each in (kernel, other)] == [1, 0]


def test_equal_ptx_is_compiled_once(device_name: str, make_kernel: Make, tmp_path: Path) -> None:
    """Another spec key with the same text renders, finds the cubin and adds none."""
    for key in ("a", "b"):
        with Device.open(device_name, cache_folder=tmp_path) as device:
            run_ramp(device, make_kernel(spec_key=key))
    assert len(list(tmp_path.glob("*/specs/*"))) == 2
    assert len(list(tmp_path.glob("*/cubins/*"))) == 1


def test_targets_and_devices_do_not_mix(make_kernel: Make, tmp_path: Path) -> None:
    for target in ("sm_80", "sm_90"):
        with Device.open(f"emulator:{target}", cache_folder=tmp_path) as device:
            run_ramp(device, make_kernel())
    assert [p.name for p in tmp_path.iterdir()] == ["emulator"]
    assert len(list(tmp_path.glob("emulator/cubins/*"))) == 2


def test_without_a_folder_nothing_is_written(
    device_name: str, make_kernel: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Device.open(device_name) as device:
        run_ramp(device, make_kernel())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty"])
def test_damaged_cubin_is_rebuilt_once(
    device_name: str, make_kernel: Make, tmp_path: Path, damage: str
) -> None:
    with Device.open(device_name, cache_folder=tmp_path) as device:
        run_ramp(device, make_kernel())
        (path,) = tmp_path.glob("*/cubins/*")
        whole = path.read_bytes()
        path.write_bytes(
            {
                "cut": whole[: len(whole) // 2],
                "flipped": whole[:20] + bytes([whole[20] ^ 1]) + whole[21:],
                "foreign": b"GIF89a" * 20,
                "empty": b"",
            }[damage]
        )
    kernel = make_kernel()
    with Device.open(device_name, cache_folder=tmp_path) as device:
        with pytest.warns(CacheWarning, match="rebuilt"):
            run_ramp(device, kernel)
        assert path.read_bytes() == whole
    assert len(kernel.rendered[0]) == 1


def test_cubin_that_does_not_load_is_rebuilt_once(
    emulator: Device, make_kernel: Make, tmp_path: Path
) -> None:
    with Device.open("emulator", cache_folder=tmp_path) as device:
        run_ramp(device, make_kernel())
    with Device.open("emulator", cache_folder=tmp_path) as device:
        device.api.inject("module_load")
        with pytest.warns(CacheWarning, match="does not load .*CUDA_ERROR_INVALID_IMAGE"):
            run_ramp(device, make_kernel())
    with Device.open("emulator", cache_folder=tmp_path) as device:
        device.api.inject("module_load")
        device.api.inject("module_load", 2)
        with (
            pytest.warns(CacheWarning, match="does not load"),
            pytest.raises(CudaError, match="cuModuleLoadData of kernel ramp"),
        ):
            device.load(make_kernel())
        run_ramp(device, make_kernel())


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_without_memory_a_cached_cubin_stays(make_kernel: Make, tmp_path: Path, call: str) -> None:
    """And the kernel loads when there is memory again, without being compiled."""
    with Device.open("emulator", cache_folder=tmp_path) as device:
        run_ramp(device, make_kernel())
        (path,) = tmp_path.glob("*/cubins/*")
        written = path.stat().st_ino
    kernel = make_kernel()
    with Device.open("emulator", cache_folder=tmp_path) as device:
        device.api.inject(call, code="CUDA_ERROR_OUT_OF_MEMORY")
        with pytest.raises(OutOfMemoryError, match=f"{call} .*ramp"):
            device.load(kernel)
        run_ramp(device, kernel)
    assert path.stat().st_ino == written
    assert kernel.rendered[0] == []


def test_without_memory_nothing_is_said_of_a_text(emulator: Device, make_kernel: Make) -> None:
    emulator.api.inject("link")
    with pytest.raises(OutOfMemoryError, match="compiling kernel ramp"):
        emulator.load(make_kernel())
    run_ramp(emulator, make_kernel())


def test_cubin_of_other_parameters_is_not_believed(
    device_name: str, make_kernel: Make, tmp_path: Path
) -> None:
    """A stale spec map (same key, other parameters) leads to one rebuild, not to a bad launch."""
    nop = ".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry ramp() { ret; }\n"
    with Device.open(device_name, cache_folder=tmp_path) as device:
        device.load(make_kernel(text=nop, params=()))
    with (
        Device.open(device_name, cache_folder=tmp_path) as device,
        pytest.warns(CacheWarning, match="disagree"),
    ):
        run_ramp(device, make_kernel())


_RACE = """
import sys
from pathlib import Path
from urdir.driver.device import Device
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise

with Device.open(sys.argv[1], cache_folder=Path(sys.argv[2])) as device:
    device.load(Normalise(rows=1, cols=64, norm=Norm("rms", 1e-5)))
"""


@pytest.mark.slow
def test_processes_race_for_one_entry(
    device_name: str, tmp_path: Path, start_python: Start
) -> None:
    workers = [start_python(_RACE, device_name, tmp_path) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert len(list(tmp_path.glob("*/cubins/*"))) == 1
    with Device.open(device_name, cache_folder=tmp_path) as device:
        device.load(Normalise(rows=1, cols=64, norm=Norm("rms", 1e-5)))
