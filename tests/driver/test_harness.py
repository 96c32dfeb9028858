"""The kernel harness: it must notice every way in which a kernel can be wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from urdir.driver import harness
from urdir.driver.compare import compare, deviations
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, LaunchError, MismatchError
from urdir.driver.guarded import GuardedBuffer, poison
from urdir.driver.harness import check_kernel, run_kernel, time_kernel
from urdir.driver.launch import launch
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import Access, LaunchShape, Param, Tolerance

N = 40
NORM = Norm("rms", 1e-5)

HEAD = """\
.version 6.3
.target sm_75
.address_size 64
.visible .entry probe(.param .u64 x, .param .u64 y, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %i, %n, %value;
    .reg .b64 %x, %y, %offset;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u32 %n, [n];
    mov.u32 %i, %tid.x;
    setp.ge.u32 %p, %i, %n;
    @%p bra DONE;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %x, %x, %offset;
    add.u64 %y, %y, %offset;
    ld.global.b32 %value, [%x];
    st.global.b32 [%y], %value;
"""
TAIL = "DONE:\n    ret;\n}\n"


class Probe:
    """Copies the first n words of x to y, and then does what it is told to."""

    name = "probe"
    waits_for_dependencies = False
    tolerance = Tolerance()
    launch_shape = LaunchShape((1, 1, 1), (64, 1, 1))

    def __init__(self, then: str = "", dtype: str = "f32") -> None:
        self.then = then
        self.params = (
            Param("x", dtype, (N,), Access.IN),
            Param("y", dtype, (N,), Access.OUT),
            Param("n", "u32"),
        )

    def key(self, target: str) -> str:
        return f"probe-{target}-{self.then}"

    def ptx(self, target: str) -> str:
        return HEAD + self.then + TAIL

    def shape_of(self, param: Param) -> tuple[int, ...]:
        return tuple(int(extent) for extent in param.shape)

    def nbytes(self, param: Param) -> int:
        return 4 * N

    def reference(self, **inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"].copy()}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        dtype = self.params[0].numpy_dtype
        return {"x": rng.standard_normal(N).astype(dtype), "n": np.uint32(N)}

    def bytes_moved(self) -> int:
        return 8 * N

    def flops(self) -> int:
        return 0


@pytest.mark.parametrize("spec", [Normalise(2, 70, NORM), Normalise(1, 7, NORM)])
def test_a_right_kernel_passes(device: Device, spec: Normalise) -> None:
    (found,) = check_kernel(device, spec, seed=3)
    assert found.param == "y"
    assert found.size == spec.rows * spec.cols
    assert found.ok
    assert found.bound > 0


def test_outputs_are_what_the_kernel_wrote(device: Device) -> None:
    x = np.arange(N, dtype=np.float32)
    outputs = run_kernel(device, Probe(), {"x": x, "n": N})
    assert list(outputs) == ["y"]
    assert np.array_equal(outputs["y"], x)
    (found,) = check_kernel(device, Probe())
    assert (found.error, found.ratio) == (0.0, 0.0)


def test_a_check_looks_for_races_unless_told_not_to(emulator: Device) -> None:
    reads_another = "    ld.param.u64 %y, [y];\n    ld.global.b32 %value, [%y];\n"
    (found,) = check_kernel(emulator, Probe(reads_another), sanitize=False)
    assert found.ok
    with pytest.raises(CudaError, match=r"race: .*ld\.global\.b32"):
        check_kernel(emulator, Probe(reads_another))


def test_a_rounding_without_a_tolerance_is_told_how_to_have_one() -> None:
    """An error that is large, or that exceeds a tolerance, gets no such hint."""
    wanted = np.linspace(1, 2, N, dtype=np.float32)
    for factor, tolerance, hinted in (
        (1 + 1e-6, Tolerance(), True),
        (1.01, Tolerance(), False),
        (1 + 1e-5, Tolerance(rtol=1e-6), False),
    ):
        outputs = {"y": (wanted * factor).astype(np.float32)}
        spec = Probe()
        spec.tolerance = tolerance
        with pytest.raises(MismatchError) as caught:
            compare(spec, outputs, {"y": wanted})
        assert str(caught.value).endswith("Tolerance.of_sum('f32', terms=n)") == hinted


@pytest.mark.parametrize("dtype", ["f32", "s32"])
def test_elements_that_are_not_written_show(device: Device, dtype: str) -> None:
    spec = Probe(dtype=dtype)
    x = np.zeros(N, spec.params[0].numpy_dtype)
    inputs = {"x": x, "n": N - 3}
    outputs = run_kernel(device, spec, inputs)
    shown = "nan" if dtype == "f32" else "-1515870811"
    message = rf"y\[37\] is {shown}, the reference 0: .*\(3 of 40 wrong, 3 of them never written\)"
    with pytest.raises(MismatchError, match=message):
        compare(spec, outputs, spec.reference(**inputs))


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (f"    st.global.b32 [%y+{4 * N}], %value;\n", "wrote beside its output y .*byte 160"),
        ("    st.global.b32 [%y+-160], %value;\n", r"wrote beside its output y .*byte -160"),
        ("    mov.b32 %value, 1;\n    st.global.b32 [%x], %value;\n", "changed its input x at"),
    ],
)
def test_stray_writes_are_found(device: Device, then: str, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        run_kernel(device, Probe(then), {"x": np.full(N, 7, np.float32), "n": N})


def test_inputs_of_the_wrong_shape_or_type_are_refused(device: Device) -> None:
    for x in (np.zeros(N - 1, np.float32), np.zeros(N)):
        with pytest.raises(MismatchError, match=r"x is .*it must be float32 \(40,\)"):
            run_kernel(device, Probe(), {"x": x, "n": N})


def kernel_of(dtype: str, tolerance: Tolerance, size: int = 4) -> Any:
    return SimpleNamespace(
        name="k",
        params=(Param("y", dtype, (size,), Access.OUT),),
        tolerance=tolerance,
        shape_of=lambda param: (size,),
    )


def test_inputs_have_the_names_of_the_parameters(emulator: Device) -> None:
    x = np.full(N, 7, np.float32)
    with pytest.raises(LaunchError, match=r"takes n, x: missing n$"):
        run_kernel(emulator, Probe(), {"x": x})
    with pytest.raises(LaunchError, match="Probe is a class of kernels: launch one of them"):
        check_kernel(emulator, Probe)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"Normalise is a class of kernels"):
        run_kernel(emulator, Normalise, {"x": x})  # type: ignore[arg-type]


def test_the_bound_scales_with_the_largest_reference() -> None:
    kernel = kernel_of("f32", Tolerance(rtol=0.01, atol=0.5))
    wanted = {"y": np.array([0, 1, -100, 2], np.float32)}
    near = {"y": np.array([1.4, 1, -100, 2], np.float32)}
    (found,) = compare(kernel, near, wanted)
    assert found.bound == 1.5
    assert found.index == (0,)
    assert found.error == pytest.approx(1.4)
    far = {"y": np.array([0, 1, -98.4, 3.6], np.float32)}
    with pytest.raises(MismatchError, match=r"y\[\d\].*2 of 4 wrong"):
        compare(kernel, far, wanted)


def test_nan_never_passes_and_infinities_must_agree() -> None:
    kernel = kernel_of("f32", Tolerance(atol=1e9), size=2)

    def wrong(got: list[float], wanted: list[float]) -> int:
        arrays = [{"y": np.array(a, np.float32)} for a in (got, wanted)]
        return deviations(kernel, *arrays)[0].wrong

    nan, inf = float("nan"), float("inf")
    assert wrong([nan, 0], [0, 0]) == 1
    assert wrong([nan, 0], [nan, 0]) == 1
    assert wrong([0, 0], [nan, 0]) == 1
    assert wrong([-inf, 0], [-inf, 0]) == 0
    assert wrong([inf, 0], [-inf, 0]) == 1
    assert wrong([inf, 0], [5, 0]) == 1


def test_integers_and_bf16_are_compared_as_what_they_mean() -> None:
    exact = kernel_of("u64", Tolerance(), size=1)
    big = np.array([2**63], np.uint64)
    assert deviations(exact, {"y": big + np.uint64(1)}, {"y": big})[0].wrong == 1
    assert deviations(exact, {"y": big}, {"y": big})[0].wrong == 0
    bf16 = kernel_of("bf16", Tolerance(rtol=0.01), size=1)
    one, next_to_one = np.array([0x3F80], np.uint16), np.array([0x3F81], np.uint16)
    (found,) = deviations(bf16, {"y": next_to_one}, {"y": one})
    assert (found.value, found.error, found.ok) == (1.0078125, 0.0078125, True)


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 0x3F80), ("f16", 0x3C00)])
def test_ties_allow_a_step_of_a_16_bit_type_where_there_is_a_tolerance(
    dtype: str, bits: int
) -> None:
    numpy_type = kernel_of(dtype, Tolerance()).params[0].numpy_dtype
    one, next_to_one, two_on = (
        {"y": np.array([bits + n], np.uint16).view(numpy_type)} for n in (0, 1, 2)
    )
    close, exact = (kernel_of(dtype, Tolerance(rtol=r), size=1) for r in (1e-6, 0))
    assert not deviations(close, next_to_one, one)[0].ok
    assert deviations(close, next_to_one, one, ties=True)[0].ok
    assert not deviations(close, two_on, one, ties=True)[0].ok
    assert not deviations(exact, next_to_one, one, ties=True)[0].ok


def test_outputs_must_be_complete() -> None:
    kernel = kernel_of("f32", Tolerance())
    good = {"y": np.zeros(4, np.float32)}
    with pytest.raises(MismatchError, match="the kernel gave nothing"):
        compare(kernel, {}, good)
    with pytest.raises(MismatchError, match=r"the reference of y is a list, not an array .*\(4,\)"):
        compare(kernel, good, {"y": [0.0] * 4})  # type: ignore[dict-item]
    with pytest.raises(MismatchError, match="the reference gave ndarray, not the arrays by name"):
        compare(kernel, good, good["y"])  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match=r"the reference of y is float64 \(4,\)"):
        compare(kernel, good, {"y": np.zeros(4)})


# ---- guarded memory ----


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_poisoned_floats_are_nan(dtype: str) -> None:
    array = poison((3, 5), dtype)
    assert array.shape == (3, 5)
    assert np.isnan(array).all()


def test_poisoned_integers_are_odd() -> None:
    assert set(poison(7, np.uint8).tolist()) == {0xA5}
    assert set(poison(7, np.uint16, floats=True).tolist()) == {0xFFFF}  # NaN as bits of bf16


def test_a_guarded_buffer_holds_its_array(device: Device) -> None:
    array = np.arange(15, dtype=np.int16).reshape(3, 5)
    with GuardedBuffer(device, array, "x") as buffer:
        assert np.array_equal(buffer.check(), array)
        assert buffer.region.nbytes == 30
        assert buffer.region.address % 16 == 0
    with GuardedBuffer.poisoned(device, (2, 2), np.float32, "y") as buffer:
        assert np.isnan(buffer.check()).all()


@pytest.mark.parametrize("byte", [-256, -1, 30, 31, 30 + 255])
def test_a_byte_written_beside_is_found(device: Device, byte: int) -> None:
    array = np.arange(15, dtype=np.int16)
    with GuardedBuffer(device, array, "x") as buffer:
        whole = buffer.region.buffer
        whole.slice(buffer.region.offset + byte, 1).fill(0)
        assert buffer.first_beside() == byte
        with pytest.raises(MismatchError, match=rf"wrote beside x \(15,\): at byte {byte} of 30"):
            buffer.check()
        assert np.array_equal(buffer.download(), array)


# ---- time ----


def test_a_kernel_is_timed_with_its_inputs_restored(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(loaded: Any, packed: Any, stream: Any) -> None:
        seen.append(int(packed.regions["position"].download(np.uint32)[0]))
        launch(loaded, packed, stream)

    monkeypatch.setattr(harness, "launch", spy)
    spec = Advance(max_len=100, sampling=False)  # position += 1, in place
    milliseconds = time_kernel(device, spec, {"position": np.array([5], np.uint32)}, repeats=3)
    assert 0 <= milliseconds < 60_000
    assert seen == [5] * 4
