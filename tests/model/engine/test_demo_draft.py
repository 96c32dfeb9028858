"""The demo model's draft: the drafts that are accepted, in all and by position, against torch's
count, and the model's own answers.

`data/demo/demo-draft.json` has the rounds of greedy speculation with four drafts each on the 69
questions: how many, what was drafted within the answer, and what was accepted. The emulator takes
a short one of which some drafts are rejected, or all with ``--full``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.model.engine.test_demo import MISSED, QUESTIONS, _length
from tests.model.engine.test_drafts import process, verify
from urdir.driver.device import Device
from urdir.model.engine.chain_drafts import ChainDraft
from urdir.model.engine.draft_pair import file_pair, open_pair
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.families.draft_file import reads_of
from urdir.model.files.demo import BUILT_IN, DEMO_DRAFT
from urdir.model.files.source import open_model
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.text.chat import ChatTemplate, Message
from urdir.model.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent.parent / "data"
MOST = 4
#: The least of all drafts that has to be accepted; with torch it is 97 % of them.
LEAST = 0.9


class Counts(NamedTuple):
    """The rounds of an answer, the drafts within it, and those accepted."""

    rounds: int
    drafted: int
    accepted: int


class Pair(NamedTuple):
    """The demo model and its draft, and how texts become tokens."""

    draft: ChainDraft
    tokenizer: Tokenizer
    template: ChatTemplate


@pytest.fixture(scope="module")
def pair(device_name: str) -> Iterator[Pair]:
    with ExitStack() as owners:
        files = [owners.enter_context(closing(open_model(name))) for name in ("demo", DEMO_DRAFT)]
        device = owners.enter_context(Device.open(device_name, cache_folder=None))
        settings = SessionSettings(512, kv_dtype="f32", exact=True)
        draft = owners.enter_context(open_pair(file_pair(*files), device, settings, MOST))
        assert isinstance(draft, ChainDraft)
        tokenizer = Tokenizer.of(files[0])
        yield Pair(draft, tokenizer, owners.enter_context(ChatTemplate.of(files[0], tokenizer)))


@pytest.fixture(scope="module")
def torch_counts() -> dict[str, Counts]:
    found = json.loads((DATA / "demo" / "demo-draft.json").read_text(encoding="utf-8"))
    return {name: Counts(*counts) for name, counts in found.items()}


def test_the_file_is_small_and_has_tokens_of_its_own() -> None:
    assert BUILT_IN[DEMO_DRAFT].stat().st_size <= 1_500_000
    with open_model(DEMO_DRAFT) as file:
        reads = reads_of(file)
    assert (reads.hidden, reads.own_hidden) == (256, 256)
    assert 0 < reads.tokens < 2048
    assert reads.shared == ("token_embd",)


def rejected(counts: Counts) -> int:
    """The drafts that were not accepted."""
    return counts.drafted - counts.accepted


def speculated(pair: Pair, prompt: list[int], limit: int = 200) -> tuple[list[int], Counts]:
    """An answer up to the end of the turn, with drafts in every round."""
    end, draft = pair.tokenizer.encode("<|im_end|>", parse_special=True)[0], pair.draft
    rounds = drafted = accepted = 0
    made: list[list[int]] = []
    with EagerSteps(draft.session) as eager:
        answer = [int(np.argmax(process(draft, eager, prompt)))]
        while answer[-1] != end and len(answer) < limit:
            drafts = draft.propose([(0, len(eager.tokens[0]), answer[-1])], MOST)[0]
            out = verify(draft, eager, answer[-1], drafts)
            out = out[: out.index(end) + 1] if end in out else out
            rounds, accepted = rounds + 1, accepted + len(out) - 1
            made.append(out)
            answer += out
    left = len(answer)
    for out in reversed(made):  # drafts beyond the answer are not counted
        left -= len(out)
        drafted += min(MOST, len(answer) - left - 1)
    return answer, Counts(rounds, drafted, accepted)


@pytest.mark.slow
def test_drafts_are_accepted_as_torch_counts_them(
    pair: Pair, torch_counts: dict[str, Counts], device_name: str, pytestconfig: pytest.Config
) -> None:
    whole = device_name == "cuda" or pytestconfig.getoption("--full")
    questions = sorted(QUESTIONS, key=_length)
    if not whole:
        questions = [q for q in questions if rejected(torch_counts[q["id"]])][:1]
    found, wanted = [], []
    for question in questions:
        turns = [Message(m["role"], m["content"]) for m in question["messages"]]
        answer, counts = speculated(pair, pair.template.encode(turns))
        if question["id"] not in MISSED:
            assert pair.tokenizer.decode(answer[:-1]) == question["expected"]
        print(question["id"], counts, torch_counts[question["id"]])
        found.append(counts)
        wanted.append(torch_counts[question["id"]])
    if not whole:
        assert found == wanted
        assert 0 < found[0].accepted < found[0].drafted
        return
    ours, theirs = (np.sum(counts, axis=0) for counts in (found, wanted))
    assert ours[2] / ours[1] >= LEAST
    assert np.all(np.abs(ours - theirs) <= 0.01 * theirs)  # torch may break ties otherwise


@pytest.mark.full  # commands/test_draft_logits.py opens such pairs
@pytest.mark.slow
def test_an_engine_answers_with_the_draft(
    device_name: str, torch_counts: dict[str, Counts]
) -> None:
    """In the steps of an engine with default settings (`test_model_drafts.py`: sampled ones)."""
    (question,) = (q for q in QUESTIONS if q["id"] == "colors-3")
    turns = [Message(m["role"], m["content"]) for m in question["messages"]]
    drafts = DraftSettings(kind="model", most=MOST, least=MOST)
    with (
        Engine.open(draft=DEMO_DRAFT, drafts=drafts, device=device_name, context=64) as engine,
        ChatTemplate.of(engine.file, engine.tokenizer) as template,
    ):
        asked = Request(prompt=tuple(template.encode(turns)), settings=GREEDY, limit=24)
        generation = engine.generation(asked)
        assert "".join(generation.text()) == question["expected"]
        wanted = torch_counts[question["id"]].accepted
        assert generation.statistics.accepted_tokens == wanted
