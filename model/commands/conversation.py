"""A conversation with a model: its turns, and one answer after the other."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options
from urdir.model.commands.prompts import read_text
from urdir.model.commands.reasoning import begins_inside, split_reasoning
from urdir.model.commands.report import end_note, print_statistics
from urdir.model.commands.terminal import shown
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.text.chat import Message

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.generate import Generation, Statistics
    from urdir.model.engine.sampling import SamplingSettings
    from urdir.model.text.chat import ChatTemplate

_DIM, _USUAL = "\x1b[2m", "\x1b[0m"
#: Of a context this share stays free for an answer: older turns are left out instead.
_ROOM = 4


class Conversation:
    """The turns so far; the sequence that answers knows which of their tokens the cache holds.

    ``turns`` has user and assistant by turns, without the system message. When the context is full
    the oldest are left out of the prompt, but stay in ``turns``.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        args: argparse.Namespace,
        system: str | None,
        colours: bool,
    ) -> None:
        self.engine = engine
        self.args = args
        self.system = system
        self.turns: list[Message] = []
        self.statistics: Statistics | None = None
        self._template = template
        self._colours = colours
        self._left_out = 0
        self._tries = 0

    def clear(self) -> None:
        """Forget all turns."""
        self.turns, self._left_out = [], 0

    def ask(self, text: str) -> None:
        """Answer a turn of the user's; a turn that gets no answer is forgotten."""
        self._tries = 0
        self._answer([*self.turns, Message("user", text)])

    def retry(self) -> None:
        """Answer the last turn again, by other random numbers."""
        if not self.turns:
            raise ModelError("/retry: nothing has been asked")
        self._tries += 1
        asked = self.turns[:-1]
        self._answer(asked)

    def undo(self) -> None:
        """Forget the last turn and its answer."""
        if not self.turns:
            raise ModelError("/undo: nothing has been asked")
        del self.turns[-2:]
        self._left_out = min(self._left_out, len(self.turns))

    def save(self, name: str) -> None:
        """Write the conversation, a JSON list of messages."""
        messages = [dataclasses.asdict(turn) for turn in self._messages(self.turns)]
        text = json.dumps(messages, ensure_ascii=False, indent=1)
        try:
            Path(name).write_text(text + "\n", encoding="utf-8")
        except OSError as exc:
            raise ModelError(f"/save {name}: {exc.strerror}") from exc

    def load(self, name: str) -> None:
        """Go on with a conversation that `save` has written. Raises ModelError."""
        try:
            found = json.loads(read_text("/load", name))
            messages = [Message(str(entry["role"]), str(entry["content"])) for entry in found]
        except (ValueError, TypeError, LookupError) as exc:
            raise ModelError(f"/load {name}: no list of messages with role and content") from exc
        turns = [turn for turn in messages if turn.role != "system"]
        if [turn.role for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
            raise ModelError(f"/load {name}: user and assistant must take turns")
        self.clear()
        self.turns = turns
        self.system = next((turn.content for turn in messages if turn.role == "system"), None)

    def _messages(self, turns: Sequence[Message]) -> list[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, *turns]

    def _answer(self, turns: list[Message]) -> None:
        """Answer the last of ``turns``. Ctrl-C stops it; what there is of the answer stays."""
        from urdir.model.engine.generate import Generation

        pieces: list[str] = []
        try:
            prompt, until = self._prompt(turns)
            generation = Generation(
                self.engine.session,
                self.engine.tokenizer,
                prompt,
                self._settings(),
                limit=self.args.n_predict,
                stops=self.args.stop,
                ignore_end=self.args.ignore_eos,
                host_sampling=self.engine.host_sampling,
            )
            self._print(generation, until, pieces)
        except ContextFullError as exc:
            raise ModelError(f"this turn does not fit: {exc} (or /clear)") from exc
        except KeyboardInterrupt:
            print("" if pieces else "no answer: the turn is forgotten", file=sys.stderr)
            if not pieces:
                return
        self.turns = [*turns, Message("assistant", "".join(pieces))]
        self.statistics = generation.statistics
        end_note(generation.statistics, self.engine.session.context)
        if self.args.show_timings:
            print_statistics(generation.statistics)

    def _prompt(self, turns: list[Message]) -> tuple[list[int], str]:
        """Tokens of the system message and the newest of ``turns``, as many as leave room for an
        answer; and what ends the thought that the template opens."""
        context = self.engine.session.context
        room = min(self.args.n_predict or context, context // _ROOM)
        first = min(self._left_out, len(turns) - 1)
        while True:
            messages = self._messages(turns[first:])
            tokens = self._template.encode(messages)
            if len(tokens) + room <= context or first >= len(turns) - 1:
                break
            first += 2
        if first and not self._left_out:
            print(
                f"the context of {context} tokens is full: from here on the oldest turns are left "
                "out (-c N gives more)",
                file=sys.stderr,
            )
        self._left_out = first
        return tokens, begins_inside(self._template.render(messages).text)

    def _settings(self) -> SamplingSettings:
        settings = options.sampling_settings(self.args)
        return dataclasses.replace(settings, seed=(settings.seed + self._tries) % 2**64)

    def _print(self, generation: Generation, until: str, pieces: list[str]) -> None:
        """Write the answer as it comes; thoughts are dimmed where there are colours."""
        dimmed = False
        try:
            for text, is_thought in split_reasoning(_kept(generation, pieces), until):
                if self._colours and is_thought != dimmed:
                    sys.stdout.write(_DIM if is_thought else _USUAL)
                    dimmed = is_thought
                sys.stdout.write(shown(text))
                sys.stdout.flush()
        finally:
            sys.stdout.write(_USUAL if dimmed else "")
        sys.stdout.write("\n")
        sys.stdout.flush()


def _kept(generation: Generation, pieces: list[str]) -> Iterator[str]:
    """The pieces of an answer, each kept as it passes."""
    for piece in generation.text():
        pieces.append(piece)
        yield piece
