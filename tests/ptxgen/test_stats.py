"""What kernels cost: pipes, occupancy, bounds, code size."""

from __future__ import annotations

import pytest

from urdir.ptxgen import ptx
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.linear.products.gemm import Gemm
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, occupancy
from urdir.ptxgen.spec import KernelSpec
from urdir.ptxgen.target import TARGETS, TESTED, Target
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.tools.gpus import GPUS, choose_gpu
from urdir.ptxgen.tools.stats import PIPES, code_bytes, instruction_mix, measure, pipe_of, roofline
from urdir.ptxgen.weights.formats import FORMATS

needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("fma.rn.f32", "fma"),
        ("add.f32", "fma"),
        ("mul.rn.f16x2", "fma"),
        ("mad.lo.u32", "integer"),
        ("mul.wide.u32", "integer"),
        ("setp.lt.f32", "integer"),
        ("max.f32", "integer"),
        ("mov.b32", "integer"),
        ("prmt.b32", "integer"),
        ("cvt.u64.u32", "integer"),
        ("cvt.rn.f32.u32", "special"),
        ("ex2.approx.ftz.f32", "special"),
        ("ld.global.nc.v4.f32", "memory"),
        ("st.shared.b32", "memory"),
        ("cp.async.cg.shared.global", "memory"),
        ("shfl.sync.bfly.b32", "memory"),
        ("atom.global.add.u32", "memory"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "tensor"),
        ("ld.shared::cluster.f32", "memory"),
        ("mapa.shared::cluster.u32", "integer"),
        ("bar.sync", "control"),
        ("barrier.cluster.arrive.release.aligned", "control"),
        ("bra.uni", "control"),
        ("griddepcontrol.wait", "control"),
    ],
)
def test_pipes(opcode: str, pipe: str) -> None:
    assert pipe_of(tuple(opcode.split("."))) == pipe


def test_the_mix_counts_each_instruction_of_the_text_once() -> None:
    text = """.version 7.8
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p) {
    .reg .f32 %x;
    .reg .b64 %p;
    ld.param.u64 %p, [p];
    ld.global.f32 %x, [%p];
    fma.rn.f32 %x, %x, %x, %x;
    rsqrt.approx.f32 %x, %x;
    st.global.f32 [%p], %x;
    ret;
}
"""
    expected = dict.fromkeys(PIPES, 0) | {"memory": 3, "fma": 1, "special": 1, "control": 1}
    assert instruction_mix(text) == expected
    assert instruction_mix(text, "k") == expected
    with pytest.raises(PtxgenError, match="no entry 'other'"):
        instruction_mix(text, "other")
    with pytest.raises(PtxgenError, match="line"):
        instruction_mix(text.replace("ret;", "ret"))


@pytest.mark.parametrize("kernel", kernels().values(), ids=kernels())
def test_the_mix_of_every_kernel_is_complete(kernel: type[KernelSpec]) -> None:
    spec = list(kernel.examples().values())[-1]
    text = spec.ptx("sm_90a")
    mix = instruction_mix(text, spec.name)
    assert sum(mix.values()) == sum(1 for _ in ptx.parse(text).entries[spec.name].instructions)
    assert (mix["tensor"] > 0) == (
        spec.name
        in (
            "chunked_recurrence",
            "experts_gemm",
            "experts_gemm_small",
            "flash_decode",
            "gemm",
            "gemm_bytes",
            "gemm_e4m3",
            "index_scores",
            "gemm_mma",
            "gemm_mma_bytes",
            "gemm_mma_e4m3",
            "gemm_small",
            "gemm_wgmma",
            "incremental_attention",
            "latent_decode",
            "lora_shrink_packed",
            "prefill_attention",
            "prefill_block",
            "prefill_wgmma",
            "prepare_chunks",
            "short_texts",
        )
    )
    assert mix["memory"] > 0
    assert mix["control"] > 0


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # target, registers, threads, shared -> CTAs, warps, limiter: by CUDA's occupancy formulas
        (("sm_90", 64, 128, 0), (8, 32, "registers")),
        (("sm_90", 32, 256, 0), (8, 64, "threads")),
        (("sm_90", 33, 256, 0), (6, 48, "registers")),  # 40 a thread in effect
        (("sm_90", 16, 32, 0), (32, 32, "CTAs")),
        (("sm_90", 32, 128, 100 << 10), (2, 8, "shared memory")),
        (("sm_90", 255, 1024, 0), (0, 0, "registers")),
        (("sm_86", 40, 256, 0), (6, 48, "threads")),
        (("sm_86", 16, 64, 49152), (2, 4, "shared memory")),
        (("sm_75", 64, 1024, 0), (1, 32, "threads")),
        (("sm_75", 32, 128, 32768), (2, 8, "shared memory")),
        (("sm_80", 128, 96, 0), (5, 15, "registers")),
        (("sm_90a", 64, 128, 0), (8, 32, "registers")),
        (("sm_90", 0, 256, 0), (8, 64, "threads")),  # as the emulator asks: no registers
        (("sm_75", 0, 32, 0), (16, 16, "CTAs")),
        (("sm_90", 0, 33, 0), (32, 64, "threads")),
    ],
)
def test_occupancy(case: tuple[str, int, int, int], expected: tuple[int, int, str]) -> None:
    found = occupancy(*case)
    assert (found.ctas, found.warps, found.limiter) == expected
    assert found.share == found.warps / found.max_warps


def test_occupancy_of_a_target_without_known_limits() -> None:
    with pytest.raises(ValueError, match="the SM resources of sm_70 are unknown"):
        occupancy("sm_70", 32, 128, 0)


def test_every_tested_target_has_limits_and_a_gpu() -> None:
    for target in TESTED:
        assert Target.parse(target).sm in ARCHITECTURES
        assert choose_gpu(None, target).target == target
    for target in TARGETS:
        assert occupancy(target, 32, 128, 0).ctas
    for gpu in GPUS.values():  # a figure that is off by a thousand would show
        assert gpu.source
        assert 5 < gpu.flops / gpu.bandwidth < 150
        assert 1.5 < gpu.tensor_flops / gpu.flops < 50


def test_choosing_a_gpu() -> None:
    assert choose_gpu("H200", None).sm_count == 132
    assert choose_gpu("rtx 4090", "sm_89").title == "RTX 4090"
    assert choose_gpu("h200", "sm_90a").name == "h200"
    for name, target in (("h3000", None), ("h200", "sm_80"), (None, "sm_42")):
        with pytest.raises(PtxgenError):
            choose_gpu(name, target)


def test_the_bound_is_the_longer_of_the_two() -> None:
    gpu = GPUS["h200"]
    add = roofline(Add(n=1 << 20), gpu, on_tensor_cores=False)
    assert add.seconds == pytest.approx(12 * (1 << 20) / 4.8e12)
    assert add.by == "memory"
    assert add.intensity == pytest.approx(1 / 12)
    product = Gemm(FORMATS["Q4_K"], 4096, 4096, batch=512)
    bound = roofline(product, gpu, on_tensor_cores=True)
    assert bound.by == "arithmetic"
    assert bound.seconds == pytest.approx(product.flops() / 989e12)
    assert roofline(product, gpu, on_tensor_cores=False).seconds > 10 * bound.seconds


@needs_assembler
def test_measuring_a_kernel() -> None:
    spec, gpu = Gemm(FORMATS["Q4_K"], 4096, 4096, batch=64), GPUS["h200"]
    text = spec.ptx("sm_90")
    made = assemble(text, "sm_90")
    stats = measure(spec, "sm_90", gpu, text, made)
    assert stats.resources == made.entries["gemm"]
    assert stats.shared == made.entries["gemm"].shared + spec.launch_shape.shared_bytes
    assert stats.occupancy is not None
    assert stats.waves is not None
    grid = spec.launch_shape.grid
    assert stats.waves * stats.occupancy.ctas * 132 == pytest.approx(grid[0] * grid[1] * grid[2])
    assert stats.code_bytes is not None
    assert stats.code_bytes % 16 == 0  # the size of an instruction
    assert 16 * sum(stats.mix.values()) / 4 < stats.code_bytes < len(made.cubin)
    without = measure(spec, "sm_90", gpu, text, None).as_dict()
    assert without["registers"] is None
    assert without["occupancy"] is None
    assert without["bound_by"] == "memory"


@needs_assembler
def test_code_size_of_each_entry() -> None:
    one = Add(n=100).ptx("sm_90")
    two = one + one[one.index(".visible") :].replace("entry add", "entry sum")
    found = code_bytes(assemble(two, "sm_90").cubin)
    assert found.keys() == {"add", "sum"}
    assert found["add"] == found["sum"] == code_bytes(assemble(one, "sm_90").cubin)["add"]
    with pytest.raises(PtxgenError, match="ELF"):
        code_bytes(b"no ELF")
