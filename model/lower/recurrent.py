"""Rules for mixers with a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from urdir.model.families.recurrent import KimiDelta, Lightning, Recurrence
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Product
from urdir.model.graph.recurrent import Convolve, GatedNorm, Recur, Scan
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.requests import is_read_packed, packs
from urdir.model.lower.rule import Rule, alone
from urdir.model.lower.states import append_convolutions, convolution, launch_heads, scan
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.drafted_scan import DraftedScan
from urdir.ptxgen.kernels.recurrent.gated_norm import GatedNorm as GatedNormKernel
from urdir.ptxgen.kernels.recurrent.prefill_conv import PrefillConv
from urdir.ptxgen.kernels.recurrent.prefill_scan import PrefillScan
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.weights.packed import packed_nbytes

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def lower_convolve(at: Lowering, of: Convolve) -> None:
    """A convolution, left packed as well for products of its result alone. On an H200 a step of 16
    sequences of mamba-2.8b takes 2,053 us so, and with packed scans, else 2,183; of lfm2-8b-a1b
    1,478 and 1,494."""
    conv = CausalConv if at.rows.decode else PrefillConv
    channels, packed = of.conv.channels, None
    if conv.can_pack(at.rows.count, channels):
        packed = _packed(at, of.y, channels)
    convolution(at, of, packed).append(at, at.place(of.x))
    if packed is not None:
        at.packed[of.y] = packed


def lower_convolutions(at: Lowering, ops: Sequence[Op]) -> bool:
    """Convolutions alike, as of queries, keys and values, of few rows that are decoded."""
    convs = [op for op in ops if isinstance(op, Convolve)]
    rows = at.rows
    if not rows.decode or rows.prompt or at.takes_gemm(rows.count):
        return False
    made = {op.y for op in convs}
    kinds = {(op.conv.channels, op.conv.taps, op.conv.bias is None, op.f, op.layer) for op in convs}
    gated = any(op.input_gate is not None or op.output_gate is not None for op in convs)
    if gated or len(kinds) > 1 or made & {op.x for op in convs}:
        return False
    append_convolutions(at, convs)
    return True


def lower_scan(at: Lowering, of: Scan) -> None:
    """A selective scan, left packed for the products that follow where only these read it."""
    channels, packed = of.mixer.conv.channels, None
    others = [op for op in at.readers(of.y) if not isinstance(op, Product)]
    if not others and _scan_kernel(at).can_pack(at.rows.count, channels, of.mixer.size):
        packed = _packed(at, of.y, channels)
    scan(at, of, packed).append(at, at.place(of.step))
    if packed is not None:
        at.packed[of.y] = packed


def _scan_kernel(at: Lowering) -> type[SelectiveScan]:
    """The kernel of the step's rows; see `choice.selective_scan`."""
    if not at.rows.decode:
        return PrefillScan
    assert at.parts.recurrent is not None
    return DraftedScan if at.parts.recurrent.shape.drafts else SelectiveScan


def lower_recur(at: Lowering, of: Recur) -> None:
    """A recurrence of heads."""
    mixer = of.mixer
    arguments = {role: at.place(x) for role, x in zip(of.roles, of.inputs, strict=True)}
    arguments["y"] = at.place(of.y)
    match mixer:
        case Lightning():
            arguments["a"] = at.parts.weights.rates[mixer.slopes]
        case KimiDelta():
            arguments |= {"a": at.vector(mixer.a), "dt_bias": at.vector(mixer.dt_bias)}
        case Recurrence():
            arguments |= {"a": at.vector(mixer.a), "dt_bias": at.vector(mixer.dt_bias)}
            arguments |= {"skip": at.vector(mixer.skip)} if mixer.skip is not None else {}
        case _:
            assert mixer.step.bias is not None  # which the kernel adds
            arguments |= {"a": at.vector(mixer.a), "dt_bias": at.vector(mixer.step.bias)}
            arguments["skip"] = at.vector(mixer.skip)
    launch_heads(at, of.label, mixer, of.layer, **arguments)


def lower_gated_norm(at: Lowering, of: GatedNorm) -> None:
    """The norm of heads with a gate, left packed for the product that follows where only that reads
    it."""
    heads = of.x.width // of.cols
    rows = of.x.rows * heads
    packed = is_read_packed(at, of.y) and GatedNormKernel.can_pack(rows, of.cols, heads)
    if packed:
        at.packed[of.y] = at.work["packed"]
    kernel = GatedNormKernel(
        *(rows, of.cols, of.eps, of.sets, of.gates_first),
        activation=of.f,
        heads=heads if packed else 0,
    )
    x, gate, weight = at.place(of.x), at.place(of.gate), at.vector(of.weight)
    y = at.packed[of.y] if packed else at.place(of.y)
    at.launch(kernel, of.label, x=x, gate=gate, weight=weight, y=y)


def _packed(at: Lowering, y: Tensor, channels: int) -> Slice | None:
    """Where a kernel leaves vectors packed for the products that follow, if these take them so, no
    others read y, and one launch has all rows."""
    following, count = [], 0
    while isinstance(op := at.following(count), Product) and op.x is y:
        following.append(at.matrix(op.of))
        count += 1
    products = [op for op in at.readers(y) if isinstance(op, Product)]
    if not following or len(products) > count or (at.rows.decode and at.rows.prompt):
        return None
    if not packs(at, at.rows.count, following):
        return None
    return at.work["packed"].slice(0, packed_nbytes(at.rows.count, channels))


RULES: Sequence[Rule] = (
    Rule("convolve convolve convolve", lower_convolutions),
    alone("convolve", lower_convolve),
    alone("scan", lower_scan),
    alone("recur", lower_recur),
    alone("gated_norm", lower_gated_norm),
)
