"""The tests that every kernel needs, for a kernel of your own: subclass `KernelSuite`.

::

    from my_package.scale import Scale
    from urdir.model.kernel_suite import KernelSuite

    class TestScale(KernelSuite):
        kernels = (Scale,)

Each test runs once for every spec of ``Scale.examples()``. The pytest plugin of urdir provides the
devices, and skips GPU tests without a GPU.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.compile import is_whole
from urdir.driver.device import Device
from urdir.driver.emulator.properties import DEFAULT_TARGET
from urdir.driver.harness import run_kernel
from urdir.ptxgen import ptx
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE, SM_REGISTERS
from urdir.ptxgen.spec import Access, KernelSpec, examples_of, purpose_of, smallest_example
from urdir.ptxgen.target import TESTED, Target
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.tools.lint import lint

__all__ = ["EmulatorSuite", "GpuSuite", "KernelSuite", "SanitizerSuite", "TextSuite"]

#: What the emulator poses as in some tests, beside its default.
OTHER_TARGETS = ("sm_75", "sm_80", "sm_90")

#: Architectures that bring what kernels have other texts for, and the newest. Those between them
#: have the text of the one before: a kernel's smallest example is rendered for them, too.
STEPS = ("sm_75", "sm_80", "sm_90", "sm_120")

#: Targets of one text need that many registers a thread more or less at most: 65, once, and else
#: 63 (all examples of the catalog, nvJitLink 13.5).
REGISTERS_APART = 64


class _Suite:
    """What the suites have in common: a test that takes ``spec`` runs for every example."""

    #: The spec classes under test.
    kernels: ClassVar[Sequence[type[KernelSpec]]] = ()
    #: Seed of all random inputs.
    seed: ClassVar[int] = 7

    @classmethod
    def examples(cls) -> list[Any]:
        """The specs to test as pytest parameters; override it to mark or add some."""
        return [
            pytest.param(spec, id=f"{kind.name}-{name}")
            for kind in cls.kernels
            for name, spec in examples_of(kind).items()
        ]

    @classmethod
    def on_other_targets(cls) -> list[Any]:
        """The first example of each kernel with each of `OTHER_TARGETS` that it is written for, and
        where it has not the text that the emulator's default takes."""
        return [
            pytest.param(smallest_example(kind), target, id=f"{kind.name}-{target}")
            for kind in cls.kernels
            for target in OTHER_TARGETS
            if target in (spec := smallest_example(kind)).targets
            and target != spec.target_on(DEFAULT_TARGET)
        ]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest for each test of the class."""
        if not self.kernels:
            raise pytest.UsageError(f"{type(self).__name__}: set kernels = (YourSpec, ...)")
        if "spec" in metafunc.fixturenames:  # the tests of one spec after each other: see `texts`
            if type(self) not in _PARAMETERS:
                _PARAMETERS[type(self)] = self.examples()
            metafunc.parametrize("spec", _PARAMETERS[type(self)], scope="class")
        if "other_target" in metafunc.fixturenames:
            metafunc.parametrize(("small_spec", "other_target"), self.on_other_targets())

    def inputs(self, spec: KernelSpec) -> dict[str, Any]:
        """Random inputs, the same in every test."""
        return spec.make_inputs(np.random.default_rng(self.seed))


class TextSuite(_Suite):
    """Spec and PTX text, without running it."""

    def test_inputs_and_reference_have_the_declared_shapes(self, spec: KernelSpec) -> None:
        """A value of the declared shape and type for each parameter; inputs are left alone."""
        inputs = self.inputs(spec)
        _check_arrays(spec, inputs, "make_inputs", (None, Access.IN, Access.INOUT))
        before = copy.deepcopy(inputs)
        _check_arrays(spec, spec.reference(**inputs), "reference", (Access.OUT, Access.INOUT))
        for name, value in before.items():
            np.testing.assert_array_equal(inputs[name], value, "the reference changed its input")

    def test_costs_are_given(self, spec: KernelSpec) -> None:
        """Bytes, operations, and a line that says what the kernel is for."""
        assert spec.bytes_moved() > 0, f"{spec} moves no bytes"
        assert spec.flops() >= 0, f"{spec} has {spec.flops()} operations"
        assert len(purpose_of(type(spec))) > 10, (
            f"{type(spec).__name__} needs a docstring: its purpose"
        )

    def test_the_parameter_list_is_the_specs(self, spec: KernelSpec) -> None:
        """Names, types and block as declared; ``griddepcontrol.wait`` exactly where promised."""
        for target, text in texts(spec).items():
            module = _parse(text)
            assert (module.target, list(module.entries)) == (target, [spec.name])
            entry = module.entries[spec.name]
            declared = [(p.name, p.type, p.pointer_space) for p in entry.parameters]
            expected = [
                (p.name, *(("u64", "global") if p.is_pointer else (p.dtype, None)))
                for p in spec.params
            ]
            assert declared == expected, f"{target}: {declared} is not {expected}"
            assert entry.directives["maxntid"] == spec.launch_shape.block
            waits = any(i.opcode == "griddepcontrol.wait" for i in entry.instructions)
            promised = spec.waits_for_dependencies and Target.parse(target).sm >= CLUSTERS_SINCE
            assert waits == promised, (
                f"{target}: griddepcontrol.wait is {'there' if waits else 'missing'}, "
                f"waits_for_dependencies is {spec.waits_for_dependencies}"
            )

    def test_lint_finds_nothing(self, spec: KernelSpec) -> None:
        """See `urdir.ptxgen.tools.lint` for the rules."""
        for target, text in texts(spec).items():
            findings = lint(text, _parse)
            assert not findings, f"{target}:\n" + "\n".join(map(str, findings))

    def test_it_assembles_without_spills(self, spec: KernelSpec) -> None:
        """For the oldest target of every text; for the others as well where registers are scarce,
        and for the newest with the smallest example. With ``-s`` it prints what the kernel costs
        there."""
        print(f"\n{spec}")
        limit = register_limit(spec) - REGISTERS_APART
        is_smallest = spec == smallest_example(type(spec))
        for oldest, *others in sharing(spec):
            if assemble_without_spills(spec, oldest) <= limit:
                others = others[-1:] if is_smallest else []
            for target in others:
                assemble_without_spills(spec, target)


class EmulatorSuite(_Suite):
    """The kernel on the emulator: every access checked, results against the reference."""

    def test_it_agrees_with_its_reference(self, spec: KernelSpec, urdir_emulator: Device) -> None:
        """Within ``spec.tolerance``, on random inputs, between guard zones."""
        skip_where_missing(spec, urdir_emulator.native_target)
        check(urdir_emulator, spec, self.inputs(spec))

    def test_it_runs_on_another_target(self, small_spec: KernelSpec, other_target: str) -> None:
        """Templates may take other instructions there."""
        with Device.open(f"emulator:{other_target}") as device:
            check(device, small_spec, self.inputs(small_spec))


class SanitizerSuite(_Suite):
    """The kernel under the emulator's sanitizer, several times slower."""

    def test_the_sanitizer_finds_nothing(self, spec: KernelSpec, urdir_sanitizer: Device) -> None:
        """No races, and no barrier that misses a thread."""
        skip_where_missing(spec, urdir_sanitizer.native_target)
        check(urdir_sanitizer, spec, self.inputs(spec))


class GpuSuite(_Suite):
    """The kernel on the GPU: against its reference, itself and the emulator."""

    @pytest.mark.urdir_gpu
    def test_it_agrees_with_its_reference_on_the_gpu(
        self, spec: KernelSpec, urdir_gpu: Device
    ) -> None:
        """Within ``spec.tolerance``, on random inputs, between guard zones."""
        skip_where_missing(spec, urdir_gpu.native_target)
        check(urdir_gpu, spec, self.inputs(spec))

    @pytest.mark.urdir_gpu
    def test_it_gives_the_same_bits_every_time(self, spec: KernelSpec, urdir_gpu: Device) -> None:
        """A kernel that does not is racing, or adds in an order of chance."""
        skip_where_missing(spec, urdir_gpu.native_target)
        inputs = self.inputs(spec)
        first, second = (run_kernel(urdir_gpu, spec, inputs) for _ in range(2))
        for name, value in first.items():
            assert value.tobytes() == second[name].tobytes(), f"{name} differs between two runs"

    @pytest.mark.urdir_gpu
    def test_it_agrees_with_the_emulator(self, spec: KernelSpec, urdir_gpu: Device) -> None:
        """Within ``spec.tolerance``; bit for bit, the sign of zero included, where that is 0."""
        skip_where_missing(spec, urdir_gpu.native_target)
        inputs = self.inputs(spec)
        real = run_kernel(urdir_gpu, spec, inputs)
        with Device.open(f"emulator:{urdir_gpu.native_target}") as twin:
            emulated = run_kernel(twin, spec, inputs)
        compare(spec, real, emulated)
        if spec.tolerance.rtol == spec.tolerance.atol == 0:
            for name, value in real.items():
                assert value.tobytes() == emulated[name].tobytes(), f"{name}: other bits"


class KernelSuite(TextSuite, EmulatorSuite, SanitizerSuite, GpuSuite):
    """Everything: parameter list, lint, assembly for all targets, emulator and its sanitizer, and
    the GPU, if any.

    Set ``kernels`` to the spec classes under test.
    """


#: By class of tests, what its tests have in common.
_PARAMETERS: dict[type[_Suite], list[Any]] = {}


def targets(spec: KernelSpec) -> list[str]:
    """The targets of a spec that are of a tested architecture."""
    return [t for t in spec.targets if Target.parse(t).portable in TESTED]


@functools.lru_cache(maxsize=4)
def rendered(spec: KernelSpec) -> dict[str, str]:
    """Target -> PTX: of the smallest example for all `targets`, of others for the first of them and
    `STEPS`."""
    first, *others = targets(spec)
    if spec != smallest_example(type(spec)):
        others = [t for t in others if Target.parse(t).portable in STEPS]
    return {target: spec.ptx(target) for target in (first, *others)}


@functools.lru_cache(maxsize=4)
def sharing(spec: KernelSpec) -> list[list[str]]:
    """The targets, those of one text together, each list from the oldest on. One that is not
    `rendered` has the text of the portable one before."""
    found: dict[str, list[str]] = {}
    before = ""
    for target in targets(spec):
        body = before
        if (text := rendered(spec).get(target)) is not None:
            body = re.sub(r"^\.(version|target) .*$", "", text, flags=re.MULTILINE)
        if target == Target.parse(target).portable:
            before = body
        found.setdefault(body, []).append(target)
    return list(found.values())


def texts(spec: KernelSpec) -> dict[str, str]:
    """Target -> PTX: one target for every different text; its head does not count.

    Of several targets with one text it is the newest: what holds there holds for all.
    """
    known = rendered(spec)
    newest = ([t for t in same if t in known][-1] for same in reversed(sharing(spec)))
    return {target: known[target] for target in newest}


_parse = functools.lru_cache(maxsize=16)(ptx.parse)


def register_limit(spec: KernelSpec) -> int:
    """The registers that a thread may have, so that the CTAs promised fit an SM."""
    shape = spec.launch_shape
    return min(255, SM_REGISTERS // (shape.threads * max(1, shape.resident)) // 8 * 8)


def assemble_without_spills(spec: KernelSpec, target: str) -> int:
    """The registers of a thread; skips the test without the assembler."""
    if not is_available():
        pytest.skip("nvJitLink is missing: pip install 'urdir[assemble]'")
    text = spec.ptx(target)
    if is_whole(text):
        pytest.skip("the assembler ignores that warps hand over registers")
    cost = assemble(text, target, name=spec.name).entries[spec.name]
    print(
        f"  {target:7s} {cost.registers:4d} registers {cost.shared:6d} bytes shared"
        f" {cost.stack:4d} bytes stack"
    )
    assert not cost.spills, f"{target}: {cost.spill_stores} bytes of registers spilled"
    taken = cost.registers * spec.launch_shape.threads
    assert taken <= SM_REGISTERS, f"{target}: {taken} registers do not fit an SM"
    return cost.registers


def check(device: Device, spec: KernelSpec, inputs: dict[str, Any]) -> dict[str, Any]:
    """Run a kernel and compare with its reference; returns its outputs. Raises MismatchError."""
    outputs = run_kernel(device, spec, inputs)
    compare(spec, outputs, spec.reference(**inputs))
    return outputs


def skip_where_missing(spec: KernelSpec, device: str) -> None:
    """Skip the test where the kernel does not exist; ``device`` is a native target."""
    if spec.target_on(device) is None:
        pytest.skip(f"{spec.name} is for {', '.join(spec.targets)}, this is {device}")


def _check_arrays(
    spec: KernelSpec, arrays: dict[str, Any], source: str, access: Sequence[Access | None]
) -> None:
    """Every parameter of the given access is there, shaped and typed as declared."""
    wanted = {p.name: (p.numpy_dtype, spec.shape_of(p)) for p in spec.params if p.access in access}
    given = {name: (np.asarray(a).dtype, np.shape(a)) for name, a in arrays.items()}
    assert given == wanted, f"{source} of {spec} gives {given}, declared is {wanted}"
