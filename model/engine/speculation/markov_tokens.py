"""The tokens of a DSpark block, chosen one after the other, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.engine.speculation.draft import (
    DraftChain,
    DraftParts,
    DraftProduct,
    append_embedded,
    append_product,
    append_token,
)
from urdir.ptxgen.kernels.add import Add

if TYPE_CHECKING:
    from urdir.driver.plan import Plan
    from urdir.model.families.dflash import Markov
    from urdir.model.lower.rows import Rows

#: The rows of the tokens before, f32, in the draft's workspace.
PREVIOUS = "previous"


def append_markov_tokens(
    plan: Plan, parts: DraftParts, rows: Rows, markov: Markov, chain: DraftChain, slots: range
) -> None:
    """The tokens of the block whose logits are in the workspace, into the columns of ``chain``
    after the first: of one row of a block after the other, from ``slots``. Its logits get what the
    token before adds to them."""
    own, vocab, count = parts.own, parts.own.config.vocab_size, rows.count
    work, table = own.work, own.weights.matrix(markov.previous)
    product = DraftProduct("draft.markov", own.weights, markov.next)
    add = Add(count * vocab)
    for column, slot in enumerate(slots):
        previous = work[PREVIOUS].slice(0, 4 * count * markov.next.cols)
        added = work["raw logits"].slice(0, 4 * count * vocab)
        append_embedded(plan, count, table, chain.tokens(count, column), previous)
        append_product(plan, own, rows, product, previous, added)
        logits = work["logits"].slice(4 * slot * count * vocab, 4 * count * vocab)
        plan.launch(add, "draft.markov_sum", a=logits, b=added, y=logits)
        append_token(plan, parts, count, logits, chain, column + 1)
