"""Drafts against llama.cpp's (`tests/data/drafts`): logits, chains, and rounds of speculation.

A GPU takes all positions. The emulator takes a few, or all with ``--full``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.model.engine.chain_drafts import ChainDraft
from urdir.model.engine.draft_logits import logits_with_draft, scattered
from urdir.model.engine.draft_pair import file_pair, nextn_pair, open_pair
from urdir.model.engine.drafts import Draft
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.speculation.draft_streams import NO_STREAM
from urdir.model.errors import UnsupportedError
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import relative_rms

NAMES = [
    "mtp-qwen35-own",
    "mtp-deepseek2-bigram",
    "mtp-mimo2",
    "eagle3-own",
    "eagle3-d2t",
    "eagle3-shared",
    "gemma4assistant-e",
]
EXACT_RELATIVE_RMS = 1e-4
#: Tokens of the emulator's default run; a window of 20 tokens takes all.
FEW = 5
MOST = 4


@dataclass(frozen=True)
class Golden:
    """What llama.cpp makes of a pair, with rows of a draft's heads first: ``arrays`` of the npz,
    ``traces`` of the json."""

    name: str
    arrays: dict[str, Any]
    traces: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.arrays["tokens"].tolist()
        return tokens

    def of_heads(self, field: str) -> Any:
        """An array by head; drafts without heads are one."""
        array = self.arrays[field]
        return array if self.name.startswith("mtp-") else array[np.newaxis]


@dataclass(frozen=True)
class Opened:
    """A pair and what it is to do: of the first ``positions`` tokens."""

    draft: ChainDraft
    golden: Golden
    positions: int

    @property
    def is_whole(self) -> bool:
        return self.positions == len(self.golden.tokens)


@pytest.fixture(scope="module")
def open_draft(
    device_name: str,
    reference_file: Callable[[str], Path],
    parts_of: Callable[[str], tuple[str, str | None]],
) -> Iterator[Callable[..., ChainDraft]]:
    """Opens the pair of a name, until the tests of this file are through."""
    with ExitStack() as owners:

        def open_one(name: str, **settings: Any) -> ChainDraft:
            model, own = parts_of(name)
            gguf = owners.enter_context(closing(Gguf(reference_file(model))))
            file = None
            if own is not None:
                file = owners.enter_context(closing(Gguf(reference_file(own))))
            pair = nextn_pair(gguf) if file is None else file_pair(gguf, file)
            device = owners.enter_context(Device.open(device_name, cache_folder=None))
            wanted = {"context": 64, "kv_dtype": "f32", "exact": True, **settings}
            opened = open_pair(pair, device, SessionSettings(**wanted), most=MOST)
            draft = owners.enter_context(opened)
            assert isinstance(draft, ChainDraft)
            return draft

        yield open_one


@pytest.fixture(scope="module")
def read_golden(reference_golden: Callable[[str, str], Path]) -> Callable[[str], Golden]:
    def read(name: str) -> Golden:
        path = reference_golden("drafts", name)
        with np.load(path) as file:
            arrays = {field: file[field] for field in file.files}
        return Golden(name, arrays, json.loads(path.with_suffix(".json").read_text()))

    return read


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest,
    device_name: str,
    open_draft: Callable[..., ChainDraft],
    read_golden: Callable[[str], Golden],
    supported: Any,
) -> Opened:
    whole = request.config.getoption("--full") or device_name == "cuda"
    whole = whole or request.config.getoption("--references") is not None
    golden = read_golden(request.param)
    with supported(request.param):
        draft = open_draft(request.param)
    return Opened(draft, golden, len(golden.tokens) if whole else FEW)


of_each = pytest.mark.references("drafts", NAMES, argument="pair")


@of_each
@pytest.mark.turns(7, which=(1, 2, 4, 5))  # of 0 and 6 the chain is compared
def test_exact_logits_are_llama_cpp_s(pair: Opened) -> None:
    count, golden = pair.positions, pair.golden
    logits, drafted = logits_with_draft(pair.draft, golden.tokens[:count])
    if "draft_logits" not in golden.arrays:  # a chain alone
        assert relative_rms(logits, golden.arrays["logits"][:count]) <= EXACT_RELATIVE_RMS
        return
    lag = pair.draft.launches.lag  # the last row of a part has another token
    wanted = golden.of_heads("draft_logits")
    compared = count if pair.is_whole else count - lag
    assert relative_rms(logits, golden.arrays["logits"][:count]) <= EXACT_RELATIVE_RMS
    drafted = by_token(pair.draft, drafted)
    error = finite_relative_rms(drafted[:, :compared], wanted[:, :compared])
    print(f"{golden.name}: {error:.1e}")
    assert error <= EXACT_RELATIVE_RMS


def by_token(draft: Draft, rows: Any) -> Any:
    """Logits (..., n) of a draft as those of the model's tokens."""
    places = draft.parts.token_map
    vocab = draft.parts.target.config.vocab_size
    own = None if places is None else places.download(np.uint32, rows.shape[-1])
    flat = scattered(rows.reshape(-1, rows.shape[-1]), own, vocab)
    return flat.reshape(*rows.shape[:-1], vocab)


def finite_relative_rms(found: Any, wanted: Any) -> float:
    """The error where there is a number; tokens that the draft does not know have -inf in both."""
    known = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(found), known)
    return relative_rms(found[known], wanted[known])


def process(draft: Draft, eager: EagerSteps, tokens: list[int], rows: int = 7) -> Any:
    """Tokens through both, some rows a step, the last one alone: the model's logits after it."""
    eager.truncate(0)
    process_known(draft, eager, tokens, rows=rows)
    logits = eager.logits()[0]
    draft.take()
    return logits


def process_known(
    draft: Draft, eager: EagerSteps, tokens: list[int], sequence: int = 0, rows: int = 7
) -> None:
    """All but the last one of a sequence's tokens, that of the draft included."""
    start, last = 0, len(tokens) - 1
    eager.feed(tokens, sequence)
    draft.begin(sequence)
    if not draft.launches.lag:
        draft.keep(sequence, 0, 1)
    while start < last:
        end = min(start + rows, last)
        eager.process(end, sequence)
        draft.take(end - start)
        draft.keep(sequence, start + 1, end + 1)
        start = end


@of_each
@pytest.mark.turns(7, which=(0, 6))  # of EAGLE-3: rounds, below
@pytest.mark.slow
def test_a_chain_is_llama_cpp_s(pair: Opened) -> None:
    """Tokens that are drafted one after the other, after the whole text: as many as are wanted, and
    fewer, whose last logits and hidden states can be looked at."""
    draft, golden = pair.draft, pair.golden
    first, *wanted = golden.arrays["chain_ids"].tolist()
    rows, hidden = [], []
    with EagerSteps(draft.session) as eager:
        assert int(np.argmax(process(draft, eager, golden.tokens))) == first
        for count in range(1, len(wanted) + 1):
            assert draft.propose([(0, len(golden.tokens), first)], count) == [wanted[:count]]
            rows.append(draft.last_logits)
            hidden.append(draft.passed)
    error = finite_relative_rms(by_token(draft, np.stack(rows)), golden.arrays["chain_logits"])
    assert error <= EXACT_RELATIVE_RMS
    assert relative_rms(np.stack(hidden), golden.arrays["chain_h"]) <= EXACT_RELATIVE_RMS


@of_each
@pytest.mark.turns(4, which=1)
def test_rounds_of_speculation_are_llama_cpp_s(pair: Opened) -> None:
    """What is drafted, accepted and chosen in each round. Of a model whose states cannot go back
    llama.cpp repeats a round that was accepted in part, with one more token; it does not restore
    the hidden state that its draft goes on from, so that later drafts are not compared."""
    draft, traces = pair.draft, pair.golden.traces
    *prompt, last = traces["prompt"]
    rounds = [each for each in traces["rounds"] if "redo" not in each]
    if NO_STREAM in draft.parts.own.work:
        # llama.cpp reads memory there that nothing has written: zeros until batches get smaller
        rounds = [*takewhile(lambda each: len(each["draft"]) == traces["n_max"], rounds)]
    if not pair.is_whole:
        rounds = rounds[:MOST]
    is_restored = False
    with EagerSteps(draft.session) as eager:
        process(draft, eager, prompt)
        for each in rounds:
            position = len(eager.tokens[0])
            assert (each["pos0"], each["last"]) == (position, last)
            drafted = draft.propose([(0, position, last)], len(each["draft"]))[0]
            assert drafted == each["draft"] or is_restored
            out = verify(draft, eager, last, each["draft"])
            assert (out, len(out) - 1) == (each["out"], each["accepted"])
            if "restored" in each:
                is_restored = True
                out += verify(draft, eager, out[-1], [])
            last = out[-1]


def verify(draft: Draft, eager: EagerSteps, last: int, drafts: list[int]) -> list[int]:
    """The drafts that the model chooses itself, and its token after them. Its hidden states replace
    those of the draft."""
    out: list[int] = []
    for token, following in zip([last, *drafts], [*drafts, None], strict=True):
        eager.feed([token])
        draft.keep(0, eager.lengths[0], eager.lengths[0] + 1)
        out.append(int(np.argmax(eager.logits()[0])))
        draft.take()
        if out[-1] != following:
            break
    return out


@of_each
@pytest.mark.turns(4)
def test_a_replayed_graph_drafts_the_same_tokens(pair: Opened) -> None:
    """The launches of several drafts as one graph, with early starts where they are allowed."""
    draft, golden = pair.draft, pair.golden
    first, *wanted = golden.arrays["chain_ids"].tolist()
    device, stream = draft.parts.own.device, draft.session.stream
    with EagerSteps(draft.session) as eager:
        process(draft, eager, golden.tokens[: pair.positions])
        place = (0, pair.positions, first)
        eager_drafts = draft.propose([place], len(wanted))
        hidden, logits = draft.passed, draft.last_logits
        plan = draft.plan(draft.write_lasts([place], len(wanted)))
        with execute.record(plan, device) as graph:
            graph.launch(stream)
            assert draft.read_drafts(1, len(wanted)) == eager_drafts
    np.testing.assert_array_equal(draft.passed, hidden)
    np.testing.assert_array_equal(draft.last_logits, logits)


@of_each
@pytest.mark.turns(7, which=4)
@pytest.mark.slow
def test_sequences_draft_together_as_each_alone(
    pair: Opened, open_draft: Callable[..., ChainDraft]
) -> None:
    """Texts of different lengths, in pages, and a place that is idle."""
    tokens, count = pair.golden.tokens, min(3, pair.draft.shape.most)
    texts = [tokens[:9], tokens[4:11], tokens[2:6]]
    alone, firsts = [], []
    with EagerSteps(pair.draft.session) as eager:
        for text in texts:
            firsts.append(int(np.argmax(process(pair.draft, eager, text))))
            alone += pair.draft.propose([(0, len(text), firsts[-1])], count)
    draft = open_draft(pair.golden.name, sequences=3, page_len=16)
    with EagerSteps(draft.session) as eager:
        for sequence, text in enumerate(texts):
            process_known(draft, eager, text, sequence)
        logits = eager.logits(range(3))
        draft.take(3)
        assert [int(token) for token in np.argmax(logits, axis=1)] == firsts
        places = [(s, len(text), firsts[s]) for s, text in enumerate(texts)]
        assert draft.propose(places, count) == alone
        assert draft.propose(places[:2], count) == alone[:2]


@of_each
@pytest.mark.turns(8)
@pytest.mark.slow
def test_default_arithmetic_stays_near(pair: Opened, open_draft: Callable[..., ChainDraft]) -> None:
    """Tokens one by one, and a text at once, whose products are made by tensor cores."""
    golden, allowed = pair.golden, 2e-3
    draft = open_draft(golden.name, kv_dtype="f16", exact=False)
    if "draft_logits" in golden.arrays:
        _, drafted = logits_with_draft(draft, golden.tokens[:FEW])
        compared = FEW - draft.launches.lag
        wanted = golden.of_heads("draft_logits")[:, :compared]
        assert finite_relative_rms(by_token(draft, drafted)[:, :compared], wanted) <= allowed
    first = int(golden.arrays["chain_ids"][0])
    with EagerSteps(draft.session) as eager:
        process(draft, eager, golden.tokens, rows=len(golden.tokens))
        draft.propose([(0, len(golden.tokens), first)], 1)
        row = by_token(draft, draft.last_logits[np.newaxis])
    assert finite_relative_rms(row, golden.arrays["chain_logits"][:1]) <= allowed


def test_a_file_without_heads_is_refused(reference_file: Callable[[str], Path]) -> None:
    with (
        Gguf(reference_file("llama-dense")) as gguf,
        pytest.raises(UnsupportedError, match=r"there are no layers .* 'llama.nextn_predict"),
    ):
        nextn_pair(gguf)
