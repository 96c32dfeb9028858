"""What drafts of every kind launch: their tokens' embeddings, logits, and the token they propose.

A draft's row has a token, the hidden state of the position before, and its own position in the
draft's cache. `DraftLaunches` says what a kind of draft makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from urdir.model.families.draft_file import DraftConfig
from urdir.model.families.stored import Linear, Normalization
from urdir.model.graph.graph import Graph
from urdir.model.graph.ops import Norm, Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.arguments import without_none
from urdir.model.lower.chain import Chain
from urdir.model.lower.linear import lower_together
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.parts import LayerParts, StepParts
from urdir.model.lower.sheet import sheet_of
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.concat import Concat
from urdir.ptxgen.kernels.draft_token import DraftToken
from urdir.ptxgen.kernels.embedding import Embedding
from urdir.ptxgen.kernels.linear.epilogue.activation import Bounded, Scaled
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.linear.steps import Epilogue
from urdir.ptxgen.kernels.normalise import Normalise

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.lower.rows import Rows
    from urdir.model.memory.norms import NormLayer
    from urdir.model.memory.weights import Matrix, Weights

#: Buffers of a draft's workspace beside those of its layers, f32: the tokens' embeddings; vectors
#: side by side; the hidden states that the model gives; those that the draft passes on.
EMBEDDED, JOINED, GIVEN, PASSED_ON = "embedded", "joined", "given hidden", "passed hidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """What a draft's launches read and write: ``target``, whose streams are kept
    (`families.tapped`), and the draft's ``own`` description, weights, cache and workspace. A draft
    with a vocabulary of its own has a ``token_map`` (n,) u32: the model's token of each. The
    model's own heads draft its first ``tokens`` alone, where that is above 0.
    ``token_position`` (rows,) u32 is where the rows' tokens are."""

    target: StepParts
    own: LayerParts
    token_map: Slice | None = None
    token_position: Slice | None = None
    tokens: int = 0

    def vocabulary(self, rows: int) -> int:
        """The first tokens, of which a pass of this many rows makes logits: see `Matrix.first`."""
        whole = self.own.config.vocab_size
        return self.tokens if 0 < self.tokens < whole and rows <= MAX_BATCH else whole

    @property
    def output(self) -> DraftProduct:
        """What makes logits of a draft from a file of its own: the model's where they share it."""
        config, label = self.own.config, "draft.output"
        if isinstance(config, DraftConfig) and config.shares_output:
            whole = Linear(self.target.config.output.matrix)
            return DraftProduct(label, self.target.weights, whole)
        return DraftProduct(label, self.own.weights, config.output)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of rows: those of ``tokens`` (sequences, length) u32 at the rows' ``sequence`` and
    ``position`` (rows,) u32."""

    tokens: Slice
    sequences: int
    length: int
    sequence: Slice
    position: Slice


@dataclass(frozen=True, slots=True)
class DraftProduct:
    """A matrix of the draft, or of the model, and what follows the product; ``rows`` are the first
    ones that are taken, 0: all."""

    label: str
    weights: Weights
    of: Linear
    ends: tuple[Epilogue, ...] = ()
    rows: int = 0

    @property
    def taken(self) -> Linear:
        """The rows that are taken, as a description has them."""
        if not self.rows or self.rows == self.of.rows:
            return self.of
        assert self.of.bias is None
        return replace(self.of, matrix=self.of.matrix.pick((0, self.rows)))

    @property
    def matrix(self) -> Matrix:
        """The rows that are taken."""
        whole = self.weights.matrix(self.of)
        return whole.first(self.rows) if self.rows else whole


class DraftLaunches(Protocol):
    """A kind of draft, as launches appended to a plan.

    A row whose token has position p is at p - `lag` of the draft's cache.
    """

    @property
    def heads(self) -> int:
        """How many heads predict one token after the other; a single one predicts all of them."""

    @property
    def lag(self) -> int:
        """How far a row lies before the position of its token."""

    def append_given(self, plan: Plan, rows: Rows) -> None:
        """The hidden states that the streams of the target's last step give its rows, in `GIVEN`
        of the draft's workspace."""

    def append_keys(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Keys and values of a head alone."""


class HeadLaunches(DraftLaunches, Protocol):
    """A draft whose heads predict the next token of each row."""

    @property
    def moves(self) -> bool:
        """Whether each token that is drafted is at the position after the one before."""

    def append_head(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """A head: logits in the draft's workspace, and in `PASSED_ON` the hidden states from which
        the next token is drafted. ``hidden`` may be `PASSED_ON`."""


def append_embedded(
    plan: Plan, rows: int, table: Matrix, tokens: TokenRows, y: Slice, scale: float = 1.0
) -> None:
    """y (rows, cols) = scale * the tokens' rows of a table."""
    kernel = Embedding(
        table.format,
        table.rows,
        table.cols,
        tokens.length,
        rows=rows,
        sequences=tokens.sequences,
        scale=scale,
    )
    at = {"sequence": tokens.sequence, "position": tokens.position}
    plan.launch(kernel, "draft.token_embd", weights=table.data, tokens=tokens.tokens, y=y, **at)


def append_joined(
    plan: Plan,
    label: str,
    rows: int,
    cols: int,
    sources: Sequence[tuple[Slice, NormLayer | None]],
    y: Slice,
) -> None:
    """y (rows, sources, cols) = vectors (rows, cols) side by side, each normalised; the norms
    differ in their weights alone."""
    norms = [norm for _, norm in sources]
    kinds = {None if norm is None else norm.norm for norm in norms}
    assert len(kinds) == 1
    launch = {f"x{i}": x for i, (x, _) in enumerate(sources)}
    for i, norm in enumerate(norms):
        if norm is not None:
            launch |= without_none(**{f"weight{i}": norm.weight, f"bias{i}": norm.bias})
    plan.launch(Concat(rows, cols, len(sources), kinds.pop()), label, **launch, y=y)


def append_product(
    plan: Plan,
    parts: LayerParts,
    rows: Rows,
    product: DraftProduct,
    x: Slice,
    y: Slice,
    norm: Normalization | None = None,
) -> None:
    """y = the product of the norm of x, with buffers of the draft."""
    of, graph = product.taken, Graph()
    source = graph.input(Tensor("draft x", rows.count, of.cols))
    normed = Tensor("normed", rows.count, of.cols)
    first = None if norm is None else Norm(product.label, normed, source, norm)
    to = Tensor("draft y", rows.count, of.rows)
    op = Product(product.label, to, source if first is None else normed, of)
    chain = Chain(source, norm=first, products=[op], ends=product.ends, results=[to])
    with sheet_of(plan, parts) as sheet:
        at = Lowering(sheet, parts, rows, graph, fixed={source: x, to: y})
        lower_together(at, chain, [product.matrix])


def append_norm(
    plan: Plan, rows: int, label: str, norm: NormLayer, vectors: tuple[Slice, Slice, int]
) -> None:
    """y = the norm of x: ``vectors`` are x, y and the values of each."""
    x, y, cols = vectors
    weights = without_none(weight=norm.weight, bias=norm.bias)
    plan.launch(Normalise(rows, cols, norm.norm), label, x=x, y=y, **weights)


def append_logits(
    plan: Plan,
    parts: DraftParts,
    rows: Rows,
    output: DraftProduct,
    x: Slice,
    norm: Normalization | None,
) -> None:
    """The logits of the norm of x, in the draft's workspace."""
    config = parts.own.config
    ends = (*Scaled.by(config.logit_scale), *Bounded.within(config.softcap))
    output = replace(output, ends=ends)
    append_product(plan, parts.own, rows, output, x, parts.own.work["logits"], norm)


@dataclass(frozen=True, slots=True)
class DraftChain:
    """The tokens that a draft proposes: ``drafts`` (rows, columns) u32, the last token of each row
    and those drafted after it. ``numbers`` (rows,) u32 are the rows' own, ``columns`` (columns,
    stride) u32 those of the columns, the same in every row."""

    drafts: Slice
    numbers: Slice
    columns: Slice
    length: int
    stride: int

    def tokens(self, rows: int, column: int) -> TokenRows:
        """The tokens of a column."""
        at = self.columns.slice(4 * self.stride * column, 4 * rows)
        return TokenRows(self.drafts, rows, self.length, self.numbers, at)


def append_draft(
    plan: Plan, draft: HeadLaunches, parts: DraftParts, rows: Rows, chain: DraftChain, step: int
) -> None:
    """Append draft number ``step`` of rows: the token after column ``step`` of ``chain``, into the
    next column.

    The first one continues `GIVEN`, the others `PASSED_ON`. ``rows`` are as a decode step
    has them, and are moved on to the next position where the draft `moves`. A draft with several
    heads takes that of the step; the later ones keep keys and values of the same token and hidden
    state.
    """
    work, several = parts.own.work, draft.heads > 1
    hidden, tokens = work[PASSED_ON if step else GIVEN], chain.tokens(rows.count, step)
    head = step if several else 0
    for later in range(head + 1, draft.heads):
        draft.append_keys(plan, rows, later, tokens, hidden)
    draft.append_head(plan, rows, head, tokens, hidden)
    append_token(plan, parts, rows.count, work["logits"], chain, step + 1)
    if not draft.moves:
        return
    advance = Advance(parts.target.state.max_len, rows.count, rows.count, sampling=False)
    plan.launch(advance, "draft.advance", position=rows.position)


def append_token(
    plan: Plan, parts: DraftParts, rows: int, logits: Slice, chain: DraftChain, column: int
) -> None:
    """The model's token of the highest logit of each row (rows, vocab) f32, into a column of
    ``chain``."""
    append_tokens_of(plan, parts, rows, logits, (chain.drafts, chain.length, column))


def append_tokens_of(
    plan: Plan, parts: DraftParts, rows: int, logits: Slice, to: tuple[Slice, int, int]
) -> None:
    """tokens[r, column] = the model's token of the highest logit of each row (rows, vocab) f32;
    ``to``: the tokens, of how many columns, and the column."""
    vocab, own, work = parts.vocabulary(rows), parts.token_map, parts.own.work
    argmax, (tokens, columns, column) = Argmax(n=vocab, rows=rows), to
    plan.launch(argmax, "draft.argmax", logits=logits, ranks=work["ranks"])
    mapped = 0 if own is None else vocab
    kernel = DraftToken(argmax.slices, columns, column, rows=rows, mapped=mapped)
    plan.launch(kernel, "draft.token", ranks=work["ranks"], tokens=tokens, **without_none(map=own))


def append_drafts(
    plan: Plan, draft: HeadLaunches, parts: DraftParts, rows: Rows, chain: DraftChain, count: int
) -> None:
    """Append ``count`` drafts, one after the other: see `append_draft`."""
    for step in range(count):
        append_draft(plan, draft, parts, rows, chain, step)
