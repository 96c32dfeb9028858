"""Flags of models that fill masked tokens (Dream, LLaDA, RND1): llama-diffusion-cli's."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Flag, Served

_RUN = ("diffusion",)
#: `engine.diffusion.ALGORITHMS`, by llama.cpp's numbers.
_ALGORITHMS = "0 origin, 1 entropy, 2 margin, 3 random, 4 confidence"

SERVED: tuple[Flag, ...] = (
    Served(
        "--diffusion-steps",
        _RUN,
        "of Dream, LLaDA and RND1: steps in which masked tokens are filled (default: 128)",
        {"type": values.whole_number(1, 1 << 20), "metavar": "N"},
    ),
    Served(
        "--diffusion-eps",
        _RUN,
        "fill a share of the masks each step, by times from 1 to this (default: 0.001)",
        {"type": values.real_number(0.0, 1.0), "metavar": "F"},
    ),
    Served(
        "--diffusion-block-length",
        _RUN,
        "fill one block of this many tokens after the other, in place of that; 0: no blocks",
        {"type": values.whole_number(0), "metavar": "N"},
    ),
    Served(
        "--diffusion-algorithm",
        _RUN,
        f"which tokens a step keeps: {_ALGORITHMS} (default: 4)",
        {"type": values.whole_number(0, 4), "metavar": "N"},
    ),
    Served(
        "--diffusion-alg-temp",
        _RUN,
        "draw these tokens, at this temperature; 0: take the first (default: 0)",
        {"type": values.real_number(0.0, 100.0), "metavar": "F"},
    ),
    Served(
        "--diffusion-cfg-scale",
        _RUN,
        "lead logits away from those without the prompt (default: 0, off)",
        {"type": values.real_number(0.0, 100.0), "metavar": "F"},
    ),
    Served(
        "--diffusion-add-gumbel-noise",
        _RUN,
        "1: draw tokens from all logits by Gumbel noise, without top-k and top-p (default: 0)",
        {"type": values.real_number(0.0), "metavar": "F"},
    ),
    Served(
        "--diffusion-visual",
        _RUN,
        "show the text on stderr after each step",
        {"action": "store_true"},
    ),
)
