"""How launches of tiles are cut: rows, shared memory, registers, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import gguf
import pytest

from tests.ptxgen.recut import recut
from urdir.model.families.shapes import SHAPES
from urdir.model.families.synthetic import SyntheticModel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.choice import Limits
from urdir.ptxgen.kernels.linear.cut import MAX_SLOTS
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.products.gemv_room import RECORD_NBYTES, has_room
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.steps import Step
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, PORTABLE_CLUSTER, number_of
from urdir.ptxgen.target import TESTED
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.tools.gpus import GPUS
from urdir.ptxgen.weights.formats import FORMATS, Format

RMS = Norm("rms", 1e-5)

Q8_0, Q4_K, Q6_K = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K"))
QUANTISED = [f for f in FORMATS.values() if f.arithmetic == "integers"]


def limits_of(target: str) -> Limits:
    """What a big GPU of that architecture has."""
    sm = ARCHITECTURES[number_of(target)]
    return Limits(GPUS["h200"].sm_count, sm.shared, sm.shared_per_cta)


H200 = dataclasses.replace(limits_of("sm_90"), cluster=PORTABLE_CLUSTER)

#: What is multiplied on tensor cores.
i16 = functools.partial(Gemv.of, activations="i16")

every_format = pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
needs_assembler = pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 48, 1000, 4096, 14336])
@pytest.mark.parametrize(("split", "groups"), [(0, 0), (3, 1), (2, 2)])
@pytest.mark.parametrize("per_pass", [0, 1, 3])
def test_the_launch_covers_every_row(rows: int, split: int, groups: int, per_pass: int) -> None:
    """And no CTA is without rows, but for those that are meant to be."""
    others = ((Q6_K, 3 * rows), (Q4_K, 5))
    for tiles in (0, 1, 5):
        spec = i16(
            *(Q4_K, rows, 2048),
            others=others,
            split=split,
            groups=groups,
            tiles_each=tiles,
            per_pass=per_pass,
        )
        rows_cut = spec.cut.rows
        assert rows_cut.tiles >= tiles
        assert rows_cut.tiles == rows_cut.passes * rows_cut.pass_tiles
        assert rows_cut.pass_tiles % rows_cut.warps == 0
        ctas = 0
        for part, count in zip(spec.parts, (rows, 3 * rows, 5), strict=True):
            assert part.first_cta == ctas
            rows_each = 16 * rows_cut.passes * part.pass_tiles
            assert count <= part.ctas * rows_each < count + rows_each
            ctas += part.ctas
        assert spec.launch_shape.grid == (ctas, 1, 1)


def test_sms_that_a_launch_leaves_over_get_a_cta_without_rows() -> None:
    """If they are few, and that is asked for."""
    for bands, sms, idle in ((128, 132, 4), (67, 132, 65), (66, 132, 0), (132, 132, 0), (3, 4, 1)):
        spec = i16(Q8_0, 16 * bands, 256, tiles_each=1, groups=1, sms=sms, fill=True)
        assert spec.parts[0].ctas == bands
        assert spec.launch_shape.grid == (bands + idle, 1, 1)
        assert spec.cut.rows.has_tiles_beyond == (idle > 0)
        assert recut(spec, fill=False).launch_shape.grid == (bands, 1, 1)


@pytest.mark.parametrize(
    ("cols", "cluster"),
    [
        *((256, 1), (768, 1), (4096, 1), (14336, 1), (28672, 1)),
        *((768, 2), (4096, 2), (4352, 4), (14336, 8), (28672, 4)),
    ],
)
@every_format
def test_shared_memory_is_what_a_cta_may_have(fmt: Format, cols: int, cluster: int) -> None:
    """Rings, records and sums lie side by side, in that order, each aligned for its accesses.

    Records are those of a CTA's columns only, at most a cluster's share of them.
    """
    for larger in (False, True):
        least, most = H200.shared(larger)
        for gated in (False, True):
            options = {"shared": most, "least_shared": least, "cluster": cluster}
            spec = i16(fmt, 4096, cols, *[Gated()] * gated, **options)
            columns, ring, memory = spec.cut.columns, spec.cut.ring, spec.cut.memory
            cta_blocks = columns.cta_blocks
            assert (cta_blocks - 1) * cluster < columns.blocks <= cta_blocks * cluster
            assert ring.tile_nbytes % 16 == 0
            assert memory.activations == spec.cut.warps * ring.slots * ring.tile_nbytes
            assert memory.squares - memory.activations == RECORD_NBYTES["i16"] * 8 * cta_blocks
            assert memory.partials - memory.squares >= 4 * spec.cut.warps
            assert memory.partials % 16 == 0
            sums = 4 * columns.warps * (2 if gated else 1) * spec.cut.rows.pass_rows
            assert memory.partials + sums == memory.nbytes
            assert (
                least <= spec.launch_shape.shared_bytes <= max(least, most) <= H200.shared_per_cta
            )
            assert memory.nbytes <= spec.launch_shape.shared_bytes
            assert 2 <= ring.slots <= MAX_SLOTS


@pytest.mark.parametrize("cols", [4096, 8192, 14336])
def test_rows_of_e4m3_get_eight_warps(cols: int) -> None:
    """Also beside activations of 128 bytes for 32 columns; partial sums find room beside them."""
    least, most = H200.shared(larger=True)
    for steps in ((Residual(),), (Gated(),)):
        spec = Gemv.of(
            *(FORMATS["E4M3R256"], 4096, cols, *steps),
            **{"activations": "f16", "shared": most, "least_shared": least},
        )
        memory = spec.cut.memory
        assert (spec.cut.warps, spec.cut.columns.warp_blocks) == (8, cols // 2048)
        assert memory.activations % 64 == 0
        assert memory.squares - memory.activations == cols // 32 * 128
        assert memory.nbytes <= most


@every_format
@pytest.mark.parametrize("target", TESTED)
def test_rows_for_which_there_is_room_get_at_least_four_warps(fmt: Format, target: str) -> None:
    """Where activations leave less of the shared memory, the kernel is not taken."""
    limits = limits_of(target)
    _, shared = limits.shared(larger=True)
    for cols in range(4096, 65536, 2048):
        if has_room((fmt,), cols, "i16", shared):
            spec = i16(fmt, 4096, cols, shared=shared)
            assert spec.cut.warps >= 4
            assert spec.launch_shape.shared_bytes <= limits.shared_per_cta
    assert has_room((fmt,), 4096, "i16", shared)
    assert not has_room((fmt,), 65536, "i16", shared)


def test_impossible_specs_are_refused() -> None:
    for fmt, others in ((FORMATS["F16"], ()), (Q4_K, ((FORMATS["F32"], 3),))):
        with pytest.raises(PtxgenError, match="i16 activations are for weights of integers only"):
            i16(fmt, 3, 256, others=others)
    with pytest.raises(PtxgenError, match="split is 4 of 3 blocks"):
        i16(Q8_0, 3, 544, split=4)
    with pytest.raises(PtxgenError, match="36 warps: 1 to 32"):
        i16(Q4_K, 3, 1024, split=4, groups=9)
    with pytest.raises(PtxgenError, match=r"two tiles \(4352 bytes\) of 8 warps.*65536 bytes"):
        i16(Q8_0, 3, 2048, split=8)
    with pytest.raises(PtxgenError, match="more than 30000 bytes of shared memory"):
        i16(Q4_K, 3, 14336, shared=30000)
    with pytest.raises(PtxgenError, match="multiple of 256"):
        i16(Q4_K, 3, 896)
    with pytest.raises(PtxgenError, match="multiple of 256"):
        i16(Q8_0, 3, 896, others=((Q6_K, 3),))
    with pytest.raises(PtxgenError, match="residual is for one matrix that is not gated"):
        i16(Q4_K, 3, 256, Gated(), Residual())
    with pytest.raises(PtxgenError, match="cluster is 1"):
        i16(Q4_K, 3, 512, Normed(Norm("layer", 1e-5)), cluster=2)
    with pytest.raises(PtxgenError, match="is for one"):
        i16(Q4_K, 3, 256, Residual(), others=((Q4_K, 3),))
    with pytest.raises(PtxgenError, match="tiles_each is -1"):
        i16(Q4_K, 3, 256, tiles_each=-1)
    with pytest.raises(PtxgenError, match="from 1"):
        i16(Q4_K, 0, 256)


LIKE_LLAMA = [
    name
    for name, shape in SHAPES.items()
    if shape.arch in ("llama", "qwen2", "qwen3") and not shape.experts
]


def model_launches(shape: str) -> Iterator[Gemv]:
    """The launches of a Q4_K_M model's decode step, cut as for an H200."""
    model = SyntheticModel(shape, "q4_k_m")
    formats = {
        n: FORMATS[gguf.GGMLQuantizationType(t.type_id).name] for n, t in model.tensors.items()
    }

    def launch(name: str, *steps: Step, more: tuple[str, ...] = ()) -> Gemv:
        rows, cols = model.tensors[name].shape
        others = tuple((formats[n], model.tensors[n].shape[0]) for n in more)
        least, most = H200.shared(Residual() in steps)
        cut = {"shared": most, "least_shared": least, "sms": 132}
        return i16(formats[name], rows, cols, *steps, others=others, **cut)

    layers = SHAPES[shape].layers
    for number in (0, layers // 8, layers - 1):  # with Q6_K, without, with
        of = f"blk.{number}."
        bias = Bias.where([f"{of}attn_q.bias" in model.tensors])
        key_value = (f"{of}attn_k.weight", f"{of}attn_v.weight")
        yield launch(f"{of}attn_q.weight", Normed(RMS), *bias, more=key_value)
        yield launch(f"{of}attn_output.weight", Residual())
        yield launch(f"{of}ffn_gate.weight", Normed(RMS), Gated())
        yield launch(f"{of}ffn_down.weight", Residual())
    output = "token_embd.weight" if SHAPES[shape].tied else "output.weight"
    yield launch(output, Normed(RMS))


@pytest.mark.turns(4)
@pytest.mark.slow
@needs_assembler
@pytest.mark.parametrize("shape", LIKE_LLAMA)
def test_real_models_launches_spill_nothing(shape: str) -> None:
    """Two CTAs of an SM have registers: 128 a thread where they have eight warps."""
    for spec in dict.fromkeys(model_launches(shape)):
        cost = assemble(spec.ptx("sm_90"), "sm_90").entries["gemv"]
        assert not cost.spills, spec
        assert cost.registers * 2 * spec.launch_shape.threads <= 65536, spec
        assert spec.cut.warps < 8 or cost.registers <= 128, spec


@pytest.mark.turns(2)
@pytest.mark.slow
@needs_assembler
@pytest.mark.parametrize("target", TESTED)
def test_large_launches_assemble_for_every_target(target: str) -> None:
    """Without spills, with the shared memory that SMs of that kind have; the longest row is one
    for which there is room there.
    """
    limits = limits_of(target)
    (_, small), (_, large) = limits.shared(larger=False), limits.shared(larger=True)
    longest = max(cols for cols in range(4096, 65536, 256) if has_room((Q6_K,), cols, "i16", large))
    assert longest >= 8192
    for spec in (
        i16(Q4_K, 14336, 4096, Normed(RMS), Gated(), shared=small),
        i16(Q6_K, 4096, longest, Residual(), shared=large),
        i16(Q6_K, 4096, 8192, Normed(RMS), shared=small),
        i16(
            *(Q4_K, 4096, 4096),
            Normed(RMS),
            Bias(),
            others=((Q4_K, 1024), (Q6_K, 1024)),
            shared=small,
        ),
    ):
        cost = assemble(spec.ptx(target), target).entries["gemv"]
        assert not cost.spills, spec
        assert cost.registers * 2 * spec.launch_shape.threads <= 65536, spec
