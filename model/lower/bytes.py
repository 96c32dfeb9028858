"""Products of many rows in 8 bits: signed bytes of matrices chosen for it, or E4M3 matrices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from urdir.driver.kernel import nbytes_of
from urdir.model.lower.adapters import adapter_arguments
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.requests import biases
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.linear.bytes_choice import TARGETS, any_cut, choose_bytes
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.mma_choice import any_bytes_cut, choose_mma
from urdir.ptxgen.kernels.linear.pack_bytes import PackBytes
from urdir.ptxgen.kernels.linear.products.gemm_bytes import GemmBytes
from urdir.ptxgen.kernels.linear.products.gemm_e4m3 import GemmE4m3
from urdir.ptxgen.kernels.linear.products.gemm_mma_bytes import GemmMmaBytes
from urdir.ptxgen.kernels.linear.products.gemm_mma_e4m3 import GemmMmaE4m3
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.kernels.linear.steps import in_order
from urdir.ptxgen.weights import eights

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

# One object for equal kernels, with its cached properties.
_gemm_bytes = lru_cache(maxsize=1024)(GemmBytes.of)
_gemm_e4m3 = lru_cache(maxsize=1024)(GemmE4m3.of)
_gemm_mma_bytes = lru_cache(maxsize=1024)(GemmMmaBytes.of)
_gemm_mma_e4m3 = lru_cache(maxsize=1024)(GemmMmaE4m3.of)
_pack_bytes = lru_cache(maxsize=64)(PackBytes)


def append_bytes(at: Lowering, chain: Chain, matrices: Sequence[Matrix], packs: bool) -> None:
    """The products of a chain as one launch, after one that makes bytes of their vectors. They are
    left packed, as f16, for the next one where it ``packs``."""
    pair, residual = chain.pair is not None, chain.residual
    (first, *rest) = matrices
    others = [] if pair else rest
    leaves = (PackedVectors(),) if packs else ()
    of_floats = eights.are_e4m3(first.format)
    steps = in_order(GemmBytes, *biases((first, *others)), *chain.epilogue, *leaves)
    shape = (first.format, first.rows, first.cols, chain.rows)
    shapes = tuple((matrix.format, matrix.rows) for matrix in others)
    kernel: PackedProduct
    if at.limits.target in TARGETS:
        of = _gemm_e4m3 if of_floats else _gemm_bytes
        kernel = of(*shape, any_cut(chain.rows), *steps, others=shapes)
        kernel = choose_bytes(kernel, at.limits.sms)
    else:
        by_mma = _gemm_mma_e4m3 if of_floats else _gemm_mma_bytes
        kernel = by_mma(*shape, any_bytes_cut(chain.rows), *steps, others=shapes)
        kernel = choose_mma(kernel, at.limits)
    element: Literal["s8", "e4m3"] = "e4m3" if of_floats else "s8"
    launch: dict[str, Slice | None] = _packed_bytes(at, chain, first.cols, element)
    for number, (matrix, y) in enumerate(zip((first, *others), chain.results, strict=True)):
        n = str(number or "")
        launch[f"weights{n}"] = matrix.data
        launch |= {} if of_floats else {f"row_scales{n}": matrix.scales}
        launch[f"bias{n}"] = matrix.bias
        launch[f"y{n}"] = at.place(y).slice(0, nbytes_of(kernel, f"y{n}"))
    if pair:
        launch |= {"up": rest[0].data, "up_bias": rest[0].bias}
        launch |= {} if of_floats else {"up_row_scales": rest[0].scales}
    launch |= adapter_arguments(at, chain.products, 0, chain.rows, pair)
    if residual is not None:
        launch["residual"] = at.place(residual.a)
    if packs:
        at.packed[chain.y] = at.place(chain.y)
    at.launch(kernel, chain.label, **launch)


def _packed_bytes(
    at: Lowering, chain: Chain, cols: int, element: Literal["s8", "e4m3"]
) -> dict[str, Slice | None]:
    """Append the quantisation of a product's vectors to bytes with scales."""
    norm, label, source = chain.norm, f"{chain.label}.pack", at.place(chain.x)
    packed = norm is None and chain.x in at.packed
    if packed:
        source = at.packed[chain.x]
    elif norm is not None and at.completed == (chain.x, norm.of):
        source, norm = at.work["normed"], None
    elif norm is not None:
        label = f"{chain.label}.norm"
    layer = None if norm is None else at.norm(norm.of)
    kernel = _pack_bytes(chain.rows, cols, layer and layer.norm, packed, element)
    made = {"y": at.work["packed bytes"], "scales": at.work["packed scales"]}
    weights = {} if layer is None else {"weight": layer.weight, "bias": layer.bias}
    at.launch(kernel, label, x=source, **made, **weights)
    return {"x": made["y"], "x_scales": made["scales"]}
