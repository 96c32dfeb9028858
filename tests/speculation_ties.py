"""How often answers with drafts differ from those without, in default arithmetic.

Steps of several rows use other kernels than steps of one row, so that two tokens whose logits are
almost equal may change places. Greedy answers of random prompts, with and without n-gram drafts:

    PYTHONPATH=.src:. python tests/speculation_ties.py model.gguf --prompts 50 --tokens 256
    PYTHONPATH=.src:. python tests/speculation_ties.py --shape llama-3.1-8b
"""

from __future__ import annotations

import argparse

import numpy as np

from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.memory.draft_settings import DraftSettings


def answers(
    args: argparse.Namespace, drafts: DraftSettings | None
) -> tuple[list[list[int]], int, int]:
    """The tokens after each prompt, how many were drafted, and how many of these accepted."""
    model = SyntheticModel(args.shape, None) if args.shape else args.model
    found, drafted, accepted = [], 0, 0
    rng = np.random.default_rng(32)
    with Engine.open(model, device=args.device, exact=args.exact, drafts=drafts) as engine:
        vocab = engine.config.vocab_size
        for _ in range(args.prompts):
            part = rng.integers(3, vocab, rng.integers(3, 40))
            prompt = tuple(int(token) for token in np.tile(part, 3))
            request = Request(prompt=prompt, settings=GREEDY, limit=args.tokens, ignore_end=True)
            generation = Generation(engine.session, None, request)
            for _ in generation.pieces():
                pass
            found.append(generation.tokens)
            drafted += generation.statistics.drafted_tokens
            accepted += generation.statistics.accepted_tokens
    return found, drafted, accepted


def main() -> None:
    """Print the answers that differ, and where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    plain, _, _ = answers(args, None)
    found, drafted, accepted = answers(args, DraftSettings(most=7, least=3))
    differ = [
        next(at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        for mine, theirs in zip(found, plain, strict=True)
        if mine != theirs
    ]
    print(f"{len(differ)} of {args.prompts} answers differ, first at tokens {sorted(differ)}")
    print(f"{accepted} of {drafted} drafts accepted")


if __name__ == "__main__":
    main()
