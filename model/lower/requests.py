"""What launches of products can do: questions to `ptxgen.kernels.linear.choice`."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.graph.adapters import Adapt
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Norm, Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Lowering
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.linear import bytes_choice, packed_choice
from urdir.ptxgen.kernels.linear.choice import PACKED_EXACT_FROM, LinearRequest
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.lora_shrink_packed import LoraShrinkPacked
from urdir.ptxgen.kernels.linear.pack_bytes import PackBytes
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.linear.steps import Step
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed_few import Order

#: The most rows whose norms products begin and leave packed. On an H200 a step of 9, 32 and 64
#: sequences of an 8B Q4_K_M model takes 1.849, 1.974 and 2.526 ms so, else 1.975, 1.993 and 2.538;
#: of 128 and 256 4.273 and 7.737, else 4.178 and 7.580.
MOST_BEGUN = 64


#: From how many rows on attention leaves packed heads for products of few rows (of some types from
#: `PACKED_EXACT_FROM` on). On an H200 a step of 4 sequences of an 8B Q4_K_M model takes 1.381 ms
#: so, else 1.377; of 5 and 8 1.473 and 1.487, else 1.493 and 1.508.
PACKED_HEADS_FROM = 5


def request_of(at: Lowering, rows: int, matrices: Sequence[Matrix], *steps: Step) -> LinearRequest:
    """The vectors of a launch times all of the matrices, with their biases and the ``steps``."""
    shapes = tuple((matrix.format, matrix.rows) for matrix in matrices)
    batch, steps = min(rows, MAX_BATCH), (*biases(matrices), *steps)
    return LinearRequest(at.limits, shapes, matrices[0].cols, batch, at.exact, steps)


def biases(matrices: Sequence[Matrix]) -> tuple[Bias, ...]:
    """The step that adds the matrices' biases; empty without biases."""
    return Bias.where([matrix.bias is not None for matrix in matrices])


def alike(gate: Matrix, up: Matrix) -> bool:
    """Whether one launch can take both: same type, shape and x, both with a bias or none."""
    same = (gate.layout, gate.order) == (up.layout, up.order)
    return same and (gate.bias is None) == (up.bias is None)


def packs(at: Lowering, rows: int, matrices: Sequence[Matrix]) -> bool:
    """Whether the product of many rows with such matrices takes packed activations."""
    formats = tuple(matrix.format for matrix in matrices)
    return at.takes_gemm(rows) and packed_choice.packs(at.limits, formats)


def takes_bytes(at: Lowering, rows: int, matrices: Sequence[Matrix]) -> bool:
    """Whether a product that ``packs`` takes bytes, made of packed activations."""

    def takes(of: Matrix) -> bool:
        is_stored = of.scales is not None or takes_e4m3(at, of)
        return is_stored and rows >= bytes_choice.least_rows(of.format)

    return all(map(takes, matrices))


def takes_halves(at: Lowering, rows: int, matrices: Sequence[Matrix]) -> bool:
    """Whether the product of many rows with such matrices takes packed activations in f16."""
    return packs(at, rows, matrices) and not takes_bytes(at, rows, matrices)


def adapts_packed(at: Lowering, of: Op) -> bool:
    """Whether an operation is an `Adapt` of the packed activations that its products take."""
    if not isinstance(of, Adapt) or of.room.element != "f16":
        return False
    readers = at.readers(of.y)
    matrices = [at.matrix(op.of) for op in readers if isinstance(op, Product)]
    all_pack = len(matrices) == len(readers) and packs(at, of.x.rows, matrices)
    as_bytes = any(takes_bytes(at, of.x.rows, [matrix]) for matrix in matrices)
    return all_pack and not as_bytes and LoraShrinkPacked.serves(of.x.width)


def next_matrix(at: Lowering, y: Tensor) -> Matrix | None:
    """The matrix of the product that follows and alone reads y; an `Adapt` may come in between that
    takes y packed, too."""
    op = at.following()
    if op is not None and adapts_packed(at, op):
        op = at.following(1)
    if not isinstance(op, Product) or op.x is not y:
        return None
    alone = all(of is op or adapts_packed(at, of) for of in at.readers(y))
    return at.matrix(op.of) if alone else None


def is_read_packed(at: Lowering, y: Tensor) -> bool:
    """Whether the product that follows takes y packed in f16, and nothing else reads y."""
    matrix = next_matrix(at, y)
    if matrix is None or len(at.readers(y)) > 1:
        return False
    return takes_halves(at, y.rows, [matrix])


def takes_e4m3(at: Lowering, matrix: Matrix) -> bool:
    """Whether a matrix is multiplied with activations as floats of eight bits."""
    on_device = bytes_choice.multiplies_e4m3(at.limits.target, matrix.format)
    return on_device and PackBytes.can_pack(matrix.cols)


def packs_few(
    at: Lowering, rows: int, matrices: Sequence[Matrix], following: Matrix
) -> Order | None:
    """In which order few rows' product with a matrix, or a gated pair, is left packed for the
    product with the next one; None: it is not."""
    made = request_of(at, rows, matrices[:1])
    whole = alike(matrices[0], matrices[-1]) and made.can_pack
    fits = whole and takes_few_packed(at, rows, following)
    return Halves(following.format).order if fits else None


def takes_few_packed(at: Lowering, rows: int, matrix: Matrix) -> bool:
    """Whether the product of few rows with the matrix takes packed activations."""
    return not at.takes_gemm(rows) and request_of(at, rows, [matrix]).takes_packed


def takes_few_heads(at: Lowering, matrix: Matrix) -> bool:
    """Whether attention leaves few rows packed for the product with the matrix."""
    rows = at.rows
    fewest = PACKED_EXACT_FROM if Halves(matrix.format).pay_early else PACKED_HEADS_FROM
    if not rows.decode or rows.prompt or rows.count < fewest:
        return False
    return takes_few_packed(at, rows.count, matrix)


def takes_few_normed(
    at: Lowering, rows: int, matrices: Sequence[Matrix], norm: NormLayer, pair: bool
) -> bool:
    """Whether the product of few rows, after the norm, takes them packed if that has begun.
    ``pair``: of two matrices, as one gated product."""
    if not norm.is_scaled_rms or (pair and not alike(*matrices)) or at.takes_gemm(rows):
        return False
    request = request_of(at, rows, matrices[: 1 if pair else None])
    return request.plus(Normed(norm.norm)).takes_packed


def next_norm(at: Lowering, chain: Chain) -> NormLayer | None:
    """The norm after the sum, if the launch may begin it, for products that read it."""
    following = at.following()
    if chain.residual is None or not isinstance(following, Norm) or following.x is not chain.y:
        return None
    if not any(isinstance(op, Product) for op in at.readers(following.y)):
        return None
    norm = at.norm(following.of)
    return norm if norm.is_scaled_rms and at.begins_block(following) else None


def packs_next_norm(at: Lowering, chain: Chain, matrices: Sequence[Matrix]) -> NormLayer | None:
    """The norm that follows the sum of many rows, where the launch may begin it and leave it
    packed: all that read it are products that take packed activations."""
    if len(matrices) > 1 or chain.residual is None:
        return None
    return packed_norm_after(at, chain.y)


def packed_norm_after(at: Lowering, y: Tensor) -> NormLayer | None:
    """The norm of the sum y of many rows that follows, where the launch that makes y may begin it
    and leave it packed."""
    following, rows = at.following(), y.rows
    if y.width % TILE_COLS or rows > MOST_BEGUN or not packed_choice.begins_norms(at.limits):
        return None
    if not isinstance(following, Norm) or following.x is not y:
        return None
    norm = at.norm(following.of)
    if not norm.is_scaled_rms or not at.begins_block(following):
        return None
    readers = [op for op in at.readers(following.y) if not adapts_packed(at, op)]
    products = [at.matrix(op.of) for op in readers if isinstance(op, Product)]
    return norm if len(products) == len(readers) and packs(at, rows, products) else None
