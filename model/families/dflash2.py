"""What DFlash2 drafts have beside those of `dflash`: convolutions within a block, around both
networks of a layer, and a selector, which chooses each token among the likeliest of its row.
llama.cpp: `src/models/dflash.cpp`; z-lab/dflash.

    side 0, of x' = norm(x), before a network; side 1 of what the network makes:
    y[i, c] = the sum over taps t of w[i, t, c] x[i - t, c]
    w[i, t, c] = base[side, t, c] + (proj . x'[i])[side, t, c / group]

    score of a candidate token = its logit + successor[token] . (predecessor[the token before] *
    (selector_hidden . norm(x)))

Taps reach back within the block. The candidates are the ``top_k`` tokens with the highest logits.
Keys: conv_kernel_size, conv_group_size; selector_rank, selector_top_k. Tensors of a layer:
attn_conv_base and ffn_conv_base (2, taps, hidden), attn_conv_proj and ffn_conv_proj (2 x taps x
groups, hidden); selector_predecessor, selector_successor (vocabulary, rank), selector_hidden (rank,
hidden).
"""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.draft_file import MAP
from urdir.model.families.reader import Reader
from urdir.model.families.stored import Linear, StoredMatrix, StoredVector
from urdir.model.files.limits import WIDTH

_HIDDEN, _BASE = "selector_hidden", "attn_conv_base"
#: Taps and candidates that kernels take.
_MOST_TAPS, _MOST_CANDIDATES = 16, 32


@dataclass(frozen=True, slots=True)
class Convolution:
    """Convolutions before and after a network: ``taps`` weights of every column in ``base``, and
    what ``dynamic`` makes of a row for every ``group`` of columns."""

    base: StoredVector
    dynamic: Linear
    taps: int
    group: int


@dataclass(frozen=True, slots=True)
class Selector:
    """A choice among the ``most`` likeliest tokens, by vectors of the token before and of each
    candidate, and by a product of the row's state."""

    predecessor: StoredMatrix
    successor: StoredMatrix
    hidden: Linear
    most: int

    @property
    def rank(self) -> int:
        """Values of these vectors."""
        return self.hidden.rows


def read_convolutions(file: Reader) -> tuple[tuple[Convolution, Convolution], ...]:
    """Those around attention and around the other network, of each layer; empty without any."""
    if not file.has(_BASE, 0):
        return ()
    hidden, taps = file.hidden, file.size("conv_kernel_size")
    group = file.size("conv_group_size")
    if taps > _MOST_TAPS or hidden % group:
        raise UnsupportedError(
            f"convolutions in a block of {taps} taps ('{file.key('conv_kernel_size')}') and groups "
            f"of {group} of {hidden} columns: at most {_MOST_TAPS} taps, and whole groups"
        )

    def around(network: str, index: int) -> Convolution:
        base = file.vector(f"{network}_conv_base", index, 2, taps, hidden)
        rows = 2 * taps * hidden // group
        dynamic = file.linear(f"{network}_conv_proj", index, rows, hidden)
        return Convolution(base, dynamic, taps, group)

    layers = range(file.layer_count())
    return tuple((around("attn", index), around("ffn", index)) for index in layers)


def read_selector(file: Reader, target: Config) -> Selector | None:
    """The selector; None without one."""
    if not file.has(f"{_HIDDEN}.weight"):
        return None
    if other := next((name for name in (MAP, "markov_w1.weight") if file.has(name)), None):
        raise UnsupportedError(
            f"tensor '{_HIDDEN}.weight': a selector beside '{other}' is not supported"
        )
    vocab, rank = target.vocab_size, file.size("selector_rank")
    WIDTH.check(rank, f"metadata key '{file.key('selector_rank')}'", ConfigError)
    most = file.size("selector_top_k")
    if most > _MOST_CANDIDATES:
        raise UnsupportedError(
            f"a selector among {most} tokens ('{file.key('selector_top_k')}'): at most "
            f"{_MOST_CANDIDATES} are supported"
        )
    return Selector(
        file.matrix("selector_predecessor", None, vocab, rank),
        file.matrix("selector_successor", None, vocab, rank),
        file.linear(_HIDDEN, None, rank, file.hidden),
        most,
    )
