"""Log-probabilities of prompts' tokens, of several requests side by side, against the log-softmax
of golden logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Item, Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.errors import SettingsError

Golden = Callable[[str], tuple[Path, list[int], Any]]
NAME = "nano-llama-q8_0"
#: Relative errors of logits that `test_golden.py` allows.
ALLOWED = {True: 1e-4, False: 1.1 * 5.65e-3}


def run(loop: AnswerLoop, requests: Sequence[Request]) -> list[tuple[list[Item], Ending]]:
    """Pieces and ending of each request."""
    found: list[list[Item]] = [[] for _ in requests]
    for request, items in zip(requests, found, strict=True):
        answer = loop.answer_to(request, items.append)
        loop.add(answer)
    while not loop.is_idle:
        loop.turn()
        for answer, items in loop.take_items().items():
            for item in items:
                answer.deliver(item)
    made = []
    for items in found:
        *pieces, ending = items
        assert isinstance(ending, Ending)
        made.append((pieces, ending))
    return made


def scores_in(pieces: Sequence[Any]) -> tuple[Any, Any]:
    """Log-probabilities and ids of the likely tokens."""
    parts = [part for piece in pieces for part in piece.scores]
    return tuple(np.concatenate(of) for of in zip(*parts, strict=True))


def root_mean_square(of: Any) -> float:
    return float(np.sqrt(np.mean(of**2)))


@pytest.fixture(
    params=[pytest.param(True, marks=pytest.mark.full), False], ids=["exact", "rounded"]
)
def exact(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def loop(exact: bool, device_name: str, golden: Golden) -> Iterator[AnswerLoop]:
    """In exact mode prompts come in chunks of 8 tokens; else more than 64 rows of a step are scored
    (`AT_ONCE`)."""
    path, tokens, _ = golden(NAME)
    kinds = {"kv_dtype": "f32" if exact else "f16", "exact": exact}
    given: Any = {"context": 2 * len(tokens), "sequences": 3, **kinds}
    with Engine.open(path, device=device_name, **given) as engine:
        limits = Limits.for_throughput(engine.session.shapes, 8)
        with AnswerLoop(engine.session, None, limits) as opened:
            yield opened


def test_they_are_those_of_the_reference(
    exact: bool, device_name: str, loop: AnswerLoop, golden: Golden
) -> None:
    """Beside an answer, and again of prompts that are cached since."""
    _, tokens, logits = golden(NAME)
    logits = logits.astype(np.float64)
    wanted = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    most = 13 if exact and device_name == "emulator" else len(tokens)
    kinds = ((most, 3, 0), (11, 0, 3), (most, 20, 1), (9, None, 2))
    requests = [
        Request(prompt=tuple(tokens[:n]), settings=GREEDY, limit=limit, prompt_logprobs=k)
        for n, k, limit in kinds
    ]
    for (n, k, _), (pieces, ending) in zip(kinds, run(loop, requests), strict=True):
        if k is None:
            assert not any(piece.scores for piece in pieces)
            continue
        assert ending.cached_tokens == 0
        values, ids = scores_in(pieces)
        assert values.shape == (n - 1, 1 + k)
        rows = np.arange(n - 1)[:, None]
        of_these = np.column_stack([np.array(tokens[1:n]), ids])
        allowed = ALLOWED[exact] * logits.std()
        assert root_mean_square(values - wanted[rows, of_these]) <= allowed
        # of likely tokens the order is that of the values, and none is missing
        assert (np.diff(values[:, 1:], axis=1) <= 0).all()
        best = -np.sort(-wanted[: n - 1], axis=1)[:, :k]
        assert k == 0 or root_mean_square(values[:, 1:] - best) <= allowed
    if not exact:
        again = Request(prompt=tuple(tokens), settings=GREEDY, limit=0)
        ((_, ending),) = run(loop, [again])
        assert ending.cached_tokens > 0  # others find what was computed


def test_what_is_no_number_of_likely_tokens() -> None:
    for wrong in (-1, 21, 0.5, True):
        with pytest.raises(SettingsError, match="expected 0 to 20"):
            Request(prompt=(1,), prompt_logprobs=wrong)  # type: ignore[arg-type]
