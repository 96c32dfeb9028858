"""Launches of products of many rows on tensor cores, which take them as packed f16."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.driver.kernel import nbytes_of
from urdir.model.lower.adapters import adapter_arguments, append_packed_shrinks, own_adapters
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Begun, Lowering
from urdir.model.lower.norms import append_norm
from urdir.model.lower.requests import biases, packs_next_norm
from urdir.model.lower.text_heads import heads_of_texts
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.linear.epilogue.heads import HeadPlaces, Heads
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.pack import Pack
from urdir.ptxgen.kernels.linear.packed_choice import choose_packed
from urdir.ptxgen.kernels.linear.prologue.norm import begun as rest_of_norm
from urdir.ptxgen.kernels.linear.steps import Step

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

# One object for equal kernels, with its cached properties.
_choose_packed = lru_cache(maxsize=1024)(choose_packed)
pack_kernel = lru_cache(maxsize=64)(Pack)


def append_packed(at: Lowering, chain: Chain, matrices: Sequence[Matrix], packs: bool) -> None:
    """The products of a chain, left packed for the next one where it ``packs``."""
    pair, residual = chain.pair is not None, chain.residual
    (first, *rest) = matrices
    others = [] if pair else rest
    begun, begins = _begun(at, chain), packs_next_norm(at, chain, matrices)
    heads = heads_of_texts(at, chain) if begun is None else None
    steps: list[Step] = [rest_of_norm(begun.norm.norm)] if begun is not None else []
    steps += [BeginNorm()] if begins is not None else []
    steps += [heads] if heads is not None else []
    kernel = _choose_packed(
        at.limits,
        first.format,
        first.rows,
        first.cols,
        chain.rows,
        *biases((first, *others)),
        *chain.epilogue,
        *steps,
        *([PackedVectors()] if packs or begins is not None else []),
        others=tuple((matrix.format, matrix.rows) for matrix in others),
    )
    x = packed_vectors(at, chain, first.cols) if begun is None else begun.scaled
    launch: dict[str, Slice | None] = {"x": x}
    if begun is not None:
        launch["x_summary"] = begun.summary
    for number, (matrix, y) in enumerate(zip((first, *others), chain.results, strict=True)):
        n = str(number or "")
        launch |= {f"weights{n}": matrix.data, f"bias{n}": matrix.bias}
        launch[f"y{n}"] = at.place(y).slice(0, nbytes_of(kernel, f"y{n}"))
    if pair:
        launch |= {"up": rest[0].data, "up_bias": rest[0].bias}
    own = own_adapters(at, chain.products, kernel, pair)
    if own is None:
        append_packed_shrinks(at, chain.products, x)
        own = kernel, adapter_arguments(at, chain.products, 0, chain.rows, pair)
    kernel, more = own
    launch |= more
    if residual is not None:
        launch["residual"] = at.place(residual.a)
    if packs:
        at.packed[chain.y] = at.place(chain.y)
    if heads is not None:
        at.halves.update(chain.results)
    if begins is not None:
        launch |= at.begin_norm(chain.y, begins, packed=True).arguments
    at.launch(kernel, chain.label, **launch)


def _begun(at: Lowering, chain: Chain) -> Begun | None:
    """What the launch before has left of the norm of a chain, if it has begun it."""
    left = at.begun.get(chain.x)
    if left is None or chain.norm is None or left.norm != at.norm(chain.norm.of):
        return None
    return left


def append_packed_heads(
    at: Lowering,
    label: str,
    matrices: Sequence[tuple[Matrix, Slice]],
    x: Slice,
    rows: int,
    places: tuple[HeadPlaces, ...],
) -> None:
    """x (rows, cols) times each matrix, as heads in a cache (`HeadPlaces`)."""
    (first, _), *others = matrices
    kernel = _choose_packed(
        at.limits,
        first.format,
        first.rows,
        first.cols,
        rows,
        *biases([matrix for matrix, _ in matrices]),
        Heads(places),
        others=tuple((matrix.format, matrix.rows) for matrix, _ in others),
    )
    # whole tiles are read, of which only these rows are written; what is made of others is not used
    packed = at.work.zeroed("packed block")
    pack = pack_kernel(rows, first.cols, None, room=places[0].room)
    at.launch(pack, f"{label}.pack", x=x, y=packed)
    launch: dict[str, Slice | None] = {"x": packed}
    for number, (matrix, y) in enumerate(matrices):
        n = str(number or "")
        launch |= {f"weights{n}": matrix.data, f"bias{n}": matrix.bias}
        launch[f"y{n}"] = y.slice(0, nbytes_of(kernel, f"y{n}"))
    at.launch(kernel, label, length=rows, **launch)


def packed_vectors(at: Lowering, chain: Chain, cols: int) -> Slice:
    """The vectors of a product, packed: by a launch, unless they are."""
    if chain.norm is None and chain.x in at.packed:
        return at.packed[chain.x]
    packed, norm, label = at.work["packed"], chain.norm, f"{chain.label}.pack"
    if norm is None:
        source = at.place(chain.x)
    elif at.completed == (chain.x, norm.of):
        source, norm = at.work["normed"], None
    elif Pack.can_norm(cols):
        source, label = at.place(chain.x), f"{chain.label}.norm"
    else:
        append_norm(at, f"{chain.label}.norm", norm, at.work["normed"])
        source, norm = at.work["normed"], None
    layer = None if norm is None else at.norm(norm.of)
    kernel = pack_kernel(chain.rows, cols, layer and layer.norm, room=0)
    weights = {} if layer is None else {"weight": layer.weight, "bias": layer.bias}
    at.launch(kernel, label, x=source, y=packed, **weights)
    return packed
