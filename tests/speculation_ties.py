"""How often steps of several rows choose another token than steps of one, in default arithmetic.

They take other kernels, so that two tokens whose logits are almost equal may change places. Greedy
answers of random prompts, with drafts (always three; n-grams, or those of a draft model) and
without, are compared up to the first token that differs; a draft that is rejected is compared, too,
as its row has chosen a token.

    PYTHONPATH=.src:. python tests/speculation_ties.py                    the demo model
    PYTHONPATH=.src:. python tests/speculation_ties.py --draft demo-draft
    PYTHONPATH=.src:. python tests/speculation_ties.py --shape llama-3.1-8b --prompts 50
    PYTHONPATH=.src:. python tests/speculation_ties.py --device emulator --prompts 2 --tokens 16

The result is one line of JSON: ``tokens`` that were compared in so many ``answers``, those that
``differ`` and at which token each is ``first`` another one, ``drafted`` and ``accepted`` drafts. By
default that takes less than a minute on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np

from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.memory.draft_settings import DraftSettings


def answers(
    args: argparse.Namespace, drafts: DraftSettings | None
) -> tuple[list[Sequence[int]], int, int]:
    """The tokens after each prompt, how many were drafted, and how many of these accepted."""
    model = SyntheticModel(args.shape, args.type) if args.shape else args.model
    found: list[Sequence[int]] = []
    drafted, accepted = 0, 0
    rng = np.random.default_rng(32)
    draft = None if drafts is None else args.draft
    options = {"device": args.device, "exact": args.exact, "draft": draft, "drafts": drafts}
    with Engine.open(model, **options) as engine:
        vocab = engine.config.vocab_size
        limit = min(args.tokens, engine.session.context - 121)
        for _ in range(args.prompts):
            part = rng.integers(3, vocab, rng.integers(3, 40))
            prompt = tuple(int(token) for token in np.tile(part, 3))
            request = Request(prompt=prompt, settings=GREEDY, limit=limit, ignore_end=True)
            generation = Generation(engine.session, None, request)
            for _ in generation.pieces():
                pass
            found.append(generation.tokens)
            drafted += generation.statistics.drafted_tokens
            accepted += generation.statistics.accepted_tokens
    return found, drafted, accepted


def compared(mine: Sequence[int], theirs: Sequence[int]) -> tuple[int, bool]:
    """How many tokens of two answers follow the same ones, and whether the last of them differs."""
    for at, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a != b:
            return at + 1, True
    return len(mine), False


def main() -> None:
    """Print how many tokens were compared, and the answers that differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft", help="the draft's file, demo-draft, or mtp (default: n-grams)")
    parser.add_argument("--shape")
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    plain, _, _ = answers(args, None)
    kind = "ngram" if args.draft is None else "model"
    found, drafted, accepted = answers(args, DraftSettings(kind=kind, most=3, least=3))
    each = [compared(*pair) for pair in zip(found, plain, strict=True)]
    result = {
        "answers": len(each),
        "tokens": sum(count for count, _ in each),
        "differ": sum(differs for _, differs in each),
        "first": sorted(count - 1 for count, differs in each if differs),
        "drafted": drafted,
        "accepted": accepted,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
