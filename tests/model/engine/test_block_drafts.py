"""Drafts of blocks against llama.cpp's (`tests/data/drafts`): logits of a block's rows, and rounds
of speculation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_drafts import (
    EXACT_RELATIVE_RMS,
    by_token,
    finite_relative_rms,
    process,
    process_known,
    verify,
)
from urdir.driver import execute
from urdir.driver.device import Device
from urdir.model.engine.block_drafts import BlockDraft
from urdir.model.engine.draft_logits import logits_with_block
from urdir.model.engine.draft_pair import file_pair, open_pair
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.speculation.selected_tokens import CANDIDATES, SCORES
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import relative_rms

FEW = 4


@dataclass(frozen=True)
class Opened:
    """A draft, opened for its model, and what llama.cpp makes of both."""

    draft: BlockDraft
    open_more: Callable[..., BlockDraft]
    arrays: dict[str, Any]
    traces: dict[str, Any]
    whole: bool

    @property
    def most(self) -> int:
        """The most tokens of a block."""
        most: int = self.traces["n_max"]
        return most

    @property
    def slots(self) -> list[int]:
        """The highest token of each slot that proposes, after the whole text; of a selector those
        on the way along the highest scores."""
        if (lattice := self.lattice) is not None:
            tokens, scores, at = lattice[0], lattice[1], 0
            way = [at := int(np.argmax(each[at])) for each in scores]
            return [int(of[place]) for of, place in zip(tokens, way, strict=True)]
        slots: list[int] = self.arrays["ids"].tolist()
        return slots[-self.most :]

    @property
    def lattice(self) -> tuple[Any, Any] | None:
        """The candidates (slots, k) of a selector in each slot that proposes, and their scores
        (slots, k, k), after each of the slot before; None without a selector."""
        selector = self.draft.launches.draft.selector
        if selector is None:
            return None
        k, rows = selector.most, self.arrays["lattice"][1:]
        scores = rows[:, k : k + k * k].reshape(-1, k, k)
        return rows[:, :k].astype(np.int64), scores

    def error(self, logits: Any) -> float:
        """Relative RMS error of a block's logits after the whole text; of a selector that of the
        scores after the tokens it chose."""
        if (lattice := self.lattice) is None:
            return finite_relative_rms(by_token(self.draft, logits), self.arrays["draft_logits"])
        (tokens, scores), work, at = lattice, self.draft.parts.own.work, 0
        shape = (self.draft.shape.slots, self.draft.shape.rows.rows, tokens.shape[1])
        mine = work[CANDIDATES].download(np.uint32, shape)[1:, 0]
        made = work[SCORES].download(np.float32, shape)[1:, 0]
        wanted = []
        for own, theirs, each in zip(mine, tokens, scores, strict=True):
            assert sorted(own) == sorted(theirs)
            wanted.append([each[at][list(theirs).index(token)] for token in own])
            at = int(np.argmax(each[at]))
        return relative_rms(made, np.array(wanted))

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.arrays["tokens"].tolist()
        return tokens


@pytest.fixture(scope="module")
def block(
    request: pytest.FixtureRequest,
    device_name: str,
    reference_file: Callable[[str], Path],
    reference_golden: Callable[[str, str], Path],
    parts_of: Callable[[str], tuple[str, str]],
) -> Iterator[Opened]:
    name, given = request.param, request.config.getoption("--references")
    whole = request.config.getoption("--full") or device_name == "cuda" or given is not None
    path = reference_golden("block drafts", name)
    with np.load(path) as file:
        arrays = {field: file[field] for field in file.files}
    traces = json.loads(path.with_suffix(".json").read_text())
    with ExitStack() as owners:

        def open_one(**settings: Any) -> BlockDraft:
            files = [owners.enter_context(closing(Gguf(reference_file(p)))) for p in parts_of(name)]
            device = owners.enter_context(Device.open(device_name, cache_folder=None))
            wanted = {"context": 64, "kv_dtype": "f32", "exact": True, **settings}
            opened = open_pair(
                file_pair(*files), device, SessionSettings(**wanted), traces["n_max"]
            )
            draft = owners.enter_context(opened)
            assert isinstance(draft, BlockDraft)
            return draft

        yield Opened(open_one(), open_one, arrays, traces, whole)


of_each = pytest.mark.references(
    "block drafts",
    ["dflash-d2t", "dspark-anchor", "dspark-bonus", "dflash2-select"],
    argument="block",
)


@pytest.mark.turns(2)
@of_each
def test_exact_logits_are_llama_cpp_s(block: Opened) -> None:
    count = len(block.tokens) if block.whole else FEW
    logits, drafted = logits_with_block(block.draft, block.tokens[:count])
    assert relative_rms(logits, block.arrays["logits"][:count]) <= EXACT_RELATIVE_RMS
    assert drafted.shape == (block.draft.shape.slots, block.draft.parts.own.config.vocab_size)
    if block.whole:
        assert block.error(drafted) <= EXACT_RELATIVE_RMS


@of_each
@pytest.mark.turns(2, which=1)
def test_a_block_after_a_text_is_llama_cpp_s(block: Opened) -> None:
    draft, first = block.draft, int(block.arrays["ids"][0])
    with EagerSteps(draft.session) as eager:
        assert int(np.argmax(process(draft, eager, block.tokens))) == first
        assert draft.propose([(0, len(block.tokens), first)], block.most) == [block.slots]
        assert block.error(draft.block_logits) <= EXACT_RELATIVE_RMS


@of_each
@pytest.mark.turns(4)
def test_rounds_of_speculation_are_llama_cpp_s(block: Opened) -> None:
    draft, traces = block.draft, block.traces
    *prompt, last = traces["prompt"]
    with EagerSteps(draft.session) as eager:
        process(draft, eager, prompt)
        for each in traces["rounds"] if block.whole else traces["rounds"][:FEW]:
            position = len(eager.tokens[0])
            assert (each["pos0"], each["last"]) == (position, last)
            assert draft.propose([(0, position, last)], len(each["draft"])) == [each["draft"]]
            out = verify(draft, eager, last, each["draft"])
            assert (out, len(out) - 1) == (each["out"], each["accepted"])
            last = out[-1]


@of_each
@pytest.mark.turns(3, which=1)
def test_a_replayed_graph_drafts_the_same_block(block: Opened) -> None:
    draft, place = block.draft, (0, 9, block.tokens[9])
    stream, device = draft.session.stream, draft.parts.own.device
    with EagerSteps(draft.session) as eager:
        process(draft, eager, block.tokens[:9])
        drafts = draft.propose([place], block.most)
        logits = draft.block_logits
        with execute.record(draft.plan(draft.write_block([place])), device) as graph:
            graph.launch(stream)
            np.testing.assert_array_equal(draft.block_logits, logits)
            assert draft.read_block(1, block.most) == drafts


@of_each
@pytest.mark.turns(8)
@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_sequences_draft_together_as_each_alone(block: Opened, exact: bool) -> None:
    """Texts of different lengths, in pages, and a place that is idle; by default arithmetic
    logits are near."""
    texts = [block.tokens[:9], block.tokens[4:11], block.tokens[2:6]]
    alone, firsts, rows = [], [], []
    with EagerSteps(block.draft.session) as eager:
        for text in texts:
            firsts.append(int(np.argmax(process(block.draft, eager, text))))
            alone += block.draft.propose([(0, len(text), firsts[-1])], block.most)
            rows.append(block.draft.block_logits)
    draft = block.open_more(sequences=3, page_len=16, exact=exact)
    with EagerSteps(draft.session) as eager:
        for sequence, text in enumerate(texts):
            process_known(draft, eager, text, sequence)
        eager.logits(range(3))
        draft.take(3)
        found = draft.propose([(s, len(t), firsts[s]) for s, t in enumerate(texts)], block.most)
        assert not exact or found == alone
        assert relative_rms(draft.block_logits, rows[0]) <= (1e-5 if exact else 2e-3)
