"""Every kernel on the GPU: against its reference, and against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.device import Device, Probe
from urdir.driver.harness import check_kernel, run_kernel
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.spec import KernelSpec
from urdir.ptxgen.target import Target

EXAMPLES = [
    # compute-sanitizer slows a kernel down a hundredfold: it sees the smallest example of each
    pytest.param(spec, id=f"{name}-{number}", marks=[] if number else [pytest.mark.sanitizer])
    for name, kind in kernels().items()
    for number, spec in enumerate(kind.examples())
]

every_example = pytest.mark.parametrize("spec", EXAMPLES)


@pytest.fixture(scope="module")
def gpu(gpu_probe: Probe) -> Iterator[Device]:
    """One device for all tests here: opening one costs more than running a kernel."""
    with Device.open("cuda") as opened:
        yield opened


@pytest.fixture(scope="module")
def twin(gpu: Device) -> Iterator[Device]:
    """An emulator that poses as the GPU."""
    with Device.open(f"emulator:{gpu.target}") as opened:
        yield opened


def runs_on(spec: KernelSpec, device: Device) -> None:
    if Target.parse(device.target).sm < spec.minimum_sm:
        pytest.skip(f"{spec.name} needs sm_{spec.minimum_sm}")


@every_example
def test_it_agrees_with_its_reference(spec, gpu):
    runs_on(spec, gpu)
    check_kernel(gpu, spec, seed=7)


@every_example
def test_it_gives_the_same_bits_every_time(spec, gpu):
    runs_on(spec, gpu)
    inputs = spec.make_inputs(np.random.default_rng(8))
    first, second = (run_kernel(gpu, spec, inputs) for _ in range(2))
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes(), name


@every_example
def test_it_agrees_with_the_emulator(spec, gpu, twin):
    runs_on(spec, gpu)
    inputs = spec.make_inputs(np.random.default_rng(9))
    real, emulated = run_kernel(gpu, spec, inputs), run_kernel(twin, spec, inputs)
    compare(spec, real, emulated)
    if spec.tolerance.rtol == spec.tolerance.atol == 0:  # also the sign of zero
        assert all(real[name].tobytes() == emulated[name].tobytes() for name in real)
