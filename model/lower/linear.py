"""Rules for products: activations times weight matrices, with what comes before and after.

For few rows one launch takes the sum, the gate or the norm before, all matrices, and the
nonlinearity or the residual after; for many rows (`takes_gemm`) most of these are launches of their
own, unless tensor cores take packed activations (`lower.packed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.graph.attention import Attend
from urdir.model.graph.latent import AttendLatent, HeadProduct
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Gate, Gather, Product
from urdir.model.lower.adapters import adapter_arguments
from urdir.model.lower.bytes import append_bytes
from urdir.model.lower.chain import Chain, adapted, read_chain
from urdir.model.lower.early import product_starts_next
from urdir.model.lower.few import append_few, goes_on, limits_allow
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.norms import append_norm, append_norm_after
from urdir.model.lower.packed import append_packed
from urdir.model.lower.requests import (
    alike,
    biases,
    next_matrix,
    packs,
    packs_few,
    request_of,
    takes_bytes,
)
from urdir.model.lower.rule import Rule, variants
from urdir.model.lower.stream import append_sum
from urdir.model.lower.vectors import with_norm
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.attention.choice import fills_sms
from urdir.ptxgen.kernels.linear.epilogue.activation import OPERATIONS, Activated
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.products.gemm import Gemm
from urdir.ptxgen.kernels.linear.steps import Epilogue, find, in_order

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

_gemm = lru_cache(maxsize=256)(Gemm.of)


def lower_products(at: Lowering, ops: Sequence[Op]) -> bool:
    """A chain of operations around products as one launch."""
    chain = read_chain(ops)
    if chain is None:
        return False
    if not _are_read_within(at, chain, ops):
        return False  # others would read what no launch makes
    return lower_chain(at, chain)


def _are_read_within(at: Lowering, chain: Chain, ops: Sequence[Op]) -> bool:
    """Whether the chain alone reads the tensors that its launch does not make: the vectors after a
    norm or gate, which all products read, and others, which the next operation reads."""
    before = [of.y for of in (chain.norm, chain.gate) if of is not None]
    made = {*before, *chain.results}
    made |= set() if chain.sum is None else {chain.sum.y}
    made |= set() if chain.next_norm is None else {chain.next_norm.y}
    inner = [op.y for op in ops if op.y not in made]
    products = len(chain.products)
    return all(len(at.readers(y)) == products for y in before) and all(map(at.is_read_once, inner))


def lower_chain(at: Lowering, chain: Chain) -> bool:
    """The launches of a chain; False where limits refuse it."""
    if chain.norm is None and (norm := at.unmade.get(chain.x)) is not None:
        chain.norm, chain.x = norm, norm.x
    matrices = [at.matrix(product.of) for product in chain.products]
    if len({matrix.format.arithmetic for matrix in matrices}) > 1:
        return _lower_apart(at, chain, matrices)
    return lower_together(at, chain, matrices)


def lower_together(at: Lowering, chain: Chain, matrices: list[Matrix]) -> bool:
    """The launches of a chain, all products in one where a launch takes several."""
    if packs(at, chain.rows, matrices):
        return _lower_packed(at, chain, matrices)
    if at.takes_gemm(chain.rows):
        return _lower_gemm(at, chain, matrices)
    return _lower_few(at, chain, matrices)


def _lower_apart(at: Lowering, chain: Chain, matrices: list[Matrix]) -> bool:
    """Floats, and quants that are floats, apart from other weights, beside which they would keep
    the activations of all in f32."""
    if chain.sum or chain.gate or chain.pair or chain.residual:
        return False  # the sum, gate or result would belong to both launches
    kinds = [matrix.format.arithmetic for matrix in matrices]
    groups = [
        ("" if kind == "integers" else f".{kind}", [i for i, of in enumerate(kinds) if of == kind])
        for kind in sorted(set(kinds), key=("integers", "floats", "e4m3").index)
    ]
    if chain.then is not None:
        first = [matrices[i] for i in next(own for _, own in groups if 0 in own)]
        if at.takes_gemm(chain.rows) or not goes_on(at, chain, request_of(at, chain.rows, first)):
            return False
    norm = chain.norm if at.takes_gemm(chain.rows) else None
    if norm is not None and at.completed != (chain.x, norm.of):
        append_norm(at, norm.label, norm, at.work["normed"])
    for suffix, own in groups:
        part = replace(
            chain,
            products=[chain.products[i] for i in own],
            results=[chain.results[i] for i in own],
            then=chain.then if 0 in own else None,
            suffix=suffix,
        )
        assert lower_together(at, part, [matrices[i] for i in own])
    return True


def _lower_packed(at: Lowering, chain: Chain, matrices: list[Matrix]) -> bool:
    """For tensor cores: packed activations (rows, cols), f16 or bytes."""
    apart = chain.sum or chain.gate or chain.gain or chain.then or chain.next_norm
    if apart is not None or (chain.pair is not None and not alike(*matrices)):
        return False
    following = None
    if chain.pair is not None or (find(chain.ends, Activated) and len(matrices) == 1):
        following = next_matrix(at, chain.y)
    leaves_packed = following is not None and packs(at, chain.rows, [following])
    append = append_bytes if takes_bytes(at, chain.rows, matrices) else append_packed
    append(at, chain, matrices, leaves_packed)
    return True


def _lower_gemm(at: Lowering, chain: Chain, matrices: list[Matrix]) -> bool:
    """For many rows without packed activations: a launch for each matrix, and for the norm."""
    if chain.sum or chain.gate or chain.pair or chain.gain or chain.then:
        return False
    if chain.next_norm is not None and not at.begins_block(chain.next_norm):
        return False
    x = _normed(at, chain)
    if chain.residual is None:
        for number, (matrix, y) in enumerate(zip(matrices, chain.results, strict=True)):
            label = f"{chain.label}.{number}" if number else chain.label
            product = chain.products[number]
            _append_gemm(at, label, product, matrix, x, at.place(y), *chain.ends)
        return True
    (matrix,), delta, label = matrices, at.work["delta"], f"{chain.label}.residual"
    _append_gemm(at, chain.label, chain.products[0], matrix, x, delta)
    if chain.next_norm is None:
        append_sum(at, label, chain.residual, delta, chain.factor)
    else:
        append_norm_after(at, label, None, delta, chain.residual, chain.next_norm, chain.factor)
    return True


def _lower_few(at: Lowering, chain: Chain, matrices: list[Matrix]) -> bool:
    """For few rows: one launch, or one for each `MAX_BATCH` of them."""
    if chain.next_norm is not None or (chain.pair is not None and not alike(*matrices)):
        return False
    pair = chain.pair is not None
    request = replace(
        request_of(at, chain.rows, matrices[:1] if pair else matrices, *chain.epilogue),
        ends_block=chain.residual is None and chain.y.is_stream,
        fill=_follows_attention(at, chain) and fills_sms(at.rows.keys),
        starts_next=product_starts_next(at, chain),
    )
    if not limits_allow(at, chain, matrices, request):
        return False
    activated = request.has(Activated) and len(matrices) == 1 and chain.residual is None
    if (pair or activated) and (following := next_matrix(at, chain.y)) is not None:
        order = packs_few(at, chain.rows, matrices, following)
        request = request.plus(PackedOutput(order)) if order is not None else request
    x = None
    if chain.norm is not None and not with_norm(chain, request).fuses_norm:
        x = _normed(at, chain)
    append_few(at, chain, matrices, request, x)
    return True


def _normed(at: Lowering, chain: Chain) -> Slice:
    """The vectors of a product after the norm, by a launch unless that is completed."""
    if chain.norm is None:
        return at.place(chain.x)
    if at.completed != (chain.x, chain.norm.of):
        append_norm(at, f"{chain.label}.norm", chain.norm, at.work["normed"])
        at.completed = chain.x, chain.norm.of
    return at.work["normed"]


def _follows_attention(at: Lowering, chain: Chain) -> bool:
    """Whether a product is the one after attention, whose launch leaves SMs idle."""
    maker = at.maker(chain.x if chain.norm is None else chain.norm.y)
    while isinstance(maker, Gather | Gate | HeadProduct):
        maker = at.maker(maker.x)
    return isinstance(maker, Attend | AttendLatent)


def _append_gemm(
    at: Lowering, label: str, of: Product, matrix: Matrix, x: Slice, y: Slice, *ends: Epilogue
) -> None:
    rows, steps = of.x.rows, in_order(Gemm, *biases([matrix]), *adapted([of]), *ends)
    kernel = _gemm(matrix.format, matrix.rows, matrix.cols, *steps, batch=rows)
    more = adapter_arguments(at, [of], 0, rows)
    at.launch(kernel, label, weights=matrix.data, x=x, bias=matrix.bias, y=y, **more)


_RUN = " ".join(["product", *(f"{word}?" for word in OPERATIONS)])
_SUMS = ("norm add scale_by? norm?", "all_reduce add scale_by? norm?")
_AFTER = (
    "product beside gate",
    "product scale? gate? add norm?",
    "product scale? gate",
)


def _rules() -> list[Rule]:
    found: list[Rule] = []
    for before in (*_SUMS, "gate", "gated_norm", "norm?"):
        for ends in _AFTER:
            found += variants(f"{before} {ends}", lower_products)
        found += [
            Rule(f"{rule.takes} ( beside )* {then}", lower_products)
            for then in ("convolve", "scan")
            for rule in variants(f"{before} product", lower_products)
        ]
        for run in variants(_RUN, lower_products):
            beside = run.takes.replace("product", "beside")
            rules = variants(f"{before} {run.takes} REST", lower_products)
            found += [
                Rule(rule.takes.replace("REST", f"( {beside} )*"), lower_products) for rule in rules
            ]
    return found


#: Chains of operations with products, the longest first.
RULES: Sequence[Rule] = _rules()
