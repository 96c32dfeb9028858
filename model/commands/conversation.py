"""A conversation with a model: turns and streamed answers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options
from urdir.model.commands.prompts import given_thinking, given_variables, read_text
from urdir.model.commands.report import end_note, print_statistics
from urdir.model.commands.terminal import shown
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.progress import until_first
from urdir.model.text.answers import AnswerParser
from urdir.model.text.chat import Message

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.generate import Generation, Statistics
    from urdir.model.engine.sampling_settings import SamplingSettings
    from urdir.model.text.chat import ChatTemplate, Prompt
    from urdir.model.text.deltas import Delta
    from urdir.model.text.formats import Format

#: Text printed before and after thoughts, with and without colours.
_DIMMED, _BETWEEN = ("\x1b[2m", "\x1b[0m\n"), ("<think>\n", "\n</think>\n")
#: Share of the context that stays free for an answer; older turns are dropped to keep it free.
_ROOM = 4


class Conversation:
    """Turns of a conversation, and the sequence that answers them.

    ``turns`` alternates user and assistant messages, without the system message. When the context
    is full the prompt omits the oldest turns; ``turns`` keeps them. The sequence tracks which
    tokens the cache holds.
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
        self.format: Format | None = None  # of answers, after any reasoning
        self.interrupted = False  # the last answer, by Ctrl-C
        self._template = template
        self._form = template.form
        self._marks = _DIMMED if colours else _BETWEEN
        self._left_out = 0
        self._tries = 0

    def clear(self) -> None:
        """Forget all turns."""
        self.turns, self._left_out = [], 0

    def ask(self, text: str) -> None:
        """Answer a user turn; forget the turn if it gets no answer."""
        self._tries = 0
        self._answer([*self.turns, Message("user", text)])

    def retry(self) -> None:
        """Answer the last turn again, with other random numbers."""
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
        """Write the conversation as a JSON list of messages."""
        messages = [
            {"role": turn.role, "content": turn.content} for turn in self._messages(self.turns)
        ]
        text = json.dumps(messages, ensure_ascii=False, indent=1)
        try:
            Path(name).expanduser().write_text(text + "\n", encoding="utf-8")
        except (OSError, RuntimeError) as exc:  # RuntimeError: no home folder of a user
            raise ModelError(f"/save {name}: {getattr(exc, 'strerror', exc)}") from exc

    def load(self, name: str) -> None:
        """Continue a conversation that `save` has written. Raises ModelError."""
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
        """Answer the last of ``turns``. Ctrl-C stops generation; the partial answer is kept."""
        from urdir.model.engine.reply import ChatPrompt
        from urdir.model.engine.requests.request import Request

        pieces: list[str] = []
        self.interrupted = False
        try:
            prompt = self._prompt(turns)
            tokens = tuple(self._template.tokens(prompt))
            chat = ChatPrompt(prompt, tokens, self._form, None, "auto")
            generation = self.engine.generation(
                Request(
                    prompt=tokens,
                    settings=self._of_this_try(),
                    limit=self.args.n_predict,
                    stops=tuple(self.args.stop),
                    ignore_end=self.args.ignore_eos,
                    constraint=chat.constraint(self.format),
                    shown=self._form.shown,
                    thoughts=self._form.limit(
                        given_thinking(self.args), prompt.text, self.args.reasoning_budget_message
                    ),
                )
            )
            self._print(generation, prompt.text, pieces)
        except ContextFullError as exc:
            raise ModelError(f"this turn does not fit: {exc} (-c N)") from exc
        except KeyboardInterrupt:
            self.interrupted = True
            self.engine.device.synchronize()  # tells whether the device goes on
            if not any(pieces):
                print("no answer: the turn is forgotten", file=sys.stderr)
                return
            print(file=sys.stderr)
        self.turns = [*turns, Message("assistant", "".join(pieces))]
        self.statistics = generation.statistics
        end_note(generation.statistics, self.engine.session.context)
        if self.args.show_timings:
            print_statistics(generation.statistics)

    def _prompt(self, turns: list[Message]) -> Prompt:
        """The system message and the newest of ``turns`` that leave room for an answer."""
        context = self.engine.session.context
        room = min(self.args.n_predict or context, context // _ROOM)
        first = min(self._left_out, len(turns) - 1)
        while True:
            messages = self._messages(turns[first:])
            prompt = self._template.render(messages, variables=given_variables(self.args))
            fits = len(self._template.tokens(prompt)) + room <= context
            if fits or first >= len(turns) - 1:
                break
            first += 2
        if first and not self._left_out:
            print(
                f"the context of {context} tokens is full: from here on the oldest turns are left "
                "out (-c N gives more)",
                file=sys.stderr,
            )
        self._left_out = first
        return prompt

    def settings(self) -> SamplingSettings:
        """How tokens are chosen: as the flags say, or else the file, or as usual."""
        return options.sampling_settings(self.args, metadata=self.engine.file.metadata)

    def _of_this_try(self) -> SamplingSettings:
        settings = self.settings()
        if settings.seed is None:
            return settings
        return dataclasses.replace(settings, seed=(settings.seed + self._tries) % 2**64)

    def _print(self, generation: Generation, prompt: str, pieces: list[str]) -> None:
        """Stream the answer to stdout; thoughts are dimmed or between tags."""
        parser = AnswerParser(self._form, prompt=prompt)
        thinks = False
        try:
            with closing(generation.text()) as made:
                for delta in _deltas(parser, until_first("prompt", made)):
                    if bool(delta.reasoning) != thinks:
                        thinks = not thinks
                        sys.stdout.write(self._marks[not thinks])
                    pieces.append(delta.content)
                    sys.stdout.write(shown(delta.reasoning + delta.content))
                    sys.stdout.flush()
        finally:
            sys.stdout.write(self._marks[1] if thinks else "")
        sys.stdout.write("\n")
        sys.stdout.flush()


def _deltas(parser: AnswerParser, pieces: Iterator[str]) -> Iterator[Delta]:
    """Split thoughts from the answer as the text arrives."""
    for piece in pieces:
        yield from parser.push(piece)
    yield from parser.finish()
