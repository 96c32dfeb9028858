"""The tokens of a DFlash2 block, each selected among the likeliest of its row by the one before, as
launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.engine.speculation.draft import (
    DraftChain,
    DraftParts,
    DraftProduct,
    TokenRows,
    append_embedded,
    append_product,
)
from urdir.model.engine.speculation.markov_tokens import PREVIOUS
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.draft_token import DraftToken
from urdir.ptxgen.kernels.speculation.select_token import SelectToken
from urdir.ptxgen.kernels.speculation.top_tokens import TopTokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.families.dflash2 import Selector
    from urdir.model.lower.parts import LayerParts
    from urdir.model.lower.rows import Rows

#: Buffers of the draft's workspace, of each row: what the selector makes of its state; its
#: candidates, their numbers, 0 for each, their scores and their vectors.
STATE, CANDIDATES, NUMBERS = "selector state", "candidates", "candidate numbers"
ZEROS, SCORES, SUCCESSORS = "candidate zeros", "candidate scores", "successors"


def selector_widths(of: Selector) -> Mapping[str, int]:
    """Values a row of these."""
    each = dict.fromkeys((CANDIDATES, NUMBERS, ZEROS, SCORES), of.most)
    return {PREVIOUS: of.rank, STATE: of.rank, SUCCESSORS: of.most * of.rank, **each}


def append_candidates(plan: Plan, own: LayerParts, rows: Rows, of: Selector, state: Slice) -> None:
    """The candidates of all ``rows``, whose logits are in the workspace, with their vectors, and
    what the selector makes of the last ``state`` (rows, hidden) f32."""
    work, weights, vocab = own.work, own.weights, own.config.vocab_size
    logits = {"logits": work["logits"], "ranks": work["ranks"]}
    plan.launch(Argmax(n=vocab, rows=rows.count), "draft.argmax", **logits)
    found = {"tokens": work[CANDIDATES], "values": work[SCORES], "numbers": work[NUMBERS]}
    plan.launch(TopTokens(vocab, rows.count, of.most), "draft.candidates", **logits, **found)
    count = rows.count * of.most
    tokens = TokenRows(work[CANDIDATES], 1, count, work[ZEROS], work[NUMBERS])
    append_embedded(plan, count, weights.matrix(of.successor), tokens, work[SUCCESSORS])
    product = DraftProduct("draft.selector", weights, of.hidden)
    append_product(plan, own, rows, product, state, work[STATE], own.config.output_norm)


def append_selection(
    plan: Plan,
    own: LayerParts,
    rows: int,
    of: Selector,
    previous: TokenRows,
    slot: int,
    probability: Slice | None = None,
) -> None:
    """The highest rank of each of the ``rows`` sequences of a slot, after the ``previous`` tokens,
    in the workspace; and how likely it is, if that is wanted."""
    work = own.work
    x = work[PREVIOUS].slice(0, 4 * rows * of.rank)
    append_embedded(plan, rows, own.weights.matrix(of.predecessor), previous, x)

    def of_slot(name: str, width: int) -> Slice:
        return work[name].slice(4 * slot * rows * width, 4 * rows * width)

    kernel = SelectToken(of.rank, of.most, rows, judged=probability is not None)
    plan.launch(
        kernel,
        "draft.select",
        previous=x,
        state=of_slot(STATE, of.rank),
        successors=of_slot(SUCCESSORS, of.most * of.rank),
        tokens=of_slot(CANDIDATES, of.most),
        scores=of_slot(SCORES, of.most),
        ranks=work["ranks"],
        **({} if probability is None else {"probability": probability}),
    )


def append_selected_tokens(
    plan: Plan, parts: DraftParts, rows: int, of: Selector, chain: DraftChain, slots: range
) -> None:
    """The tokens of the block whose candidates are in the workspace, into the columns of ``chain``
    after the first: of one row of a block after the other, from ``slots``."""
    for column, slot in enumerate(slots):
        append_selection(plan, parts.own, rows, of, chain.tokens(rows, column), slot)
        token = DraftToken(1, chain.length, column + 1, rows=rows)
        plan.launch(token, "draft.token", ranks=parts.own.work["ranks"], tokens=chain.drafts)
