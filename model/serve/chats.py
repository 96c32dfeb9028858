"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.engine.requests.request import Piece, TokenChoice
from urdir.model.serve.answer import Answer, Block, Event, Kind
from urdir.model.serve.asked import Asked
from urdir.model.serve.choices import ChoicesShape
from urdir.model.serve.conversations import read_conversation
from urdir.model.serve.fields import Fields
from urdir.model.serve.formats import read_format, refuse_beside_call
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.logprobs import chat_logprobs
from urdir.model.serve.parameters import MOST_LOGPROBS, read_limit, read_parameters
from urdir.model.serve.refusals import refuse_unsupported
from urdir.model.serve.request_fields import CHAT


def read_chat(fields: Fields, model: ServedModel, limits: Limits) -> Asked:
    """Read the request in ``fields``; ApiError if it is invalid."""
    refuse_unsupported(fields, CHAT)
    logprobs = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    wants_logprobs = fields.flag("logprobs")
    if logprobs and not wants_logprobs:
        fields.fail("top_logprobs", "needs 'logprobs': true")
    limit = read_limit(fields, model, "max_completion_tokens", "max_tokens", "n_predict")
    parameters = read_parameters(
        fields, model, limits, limit, (logprobs or 0) if wants_logprobs else None
    )
    form = read_format(fields, limits)
    conversation = read_conversation(fields, model, limits)
    if conversation.tools.is_required:
        refuse_beside_call(fields)
    echoes = fields.flag("echo") and conversation.continues == "content"
    return Asked((conversation,), parameters, form, ChatShape, echo=echoes)


_NAMES = {Kind.CONTENT: "content", Kind.REASONING: "reasoning_content"}


class ChatShape(ChoicesShape):
    """`chat.completion` and `chat.completion.chunk` objects."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[Json]:
        """The role, for each answer."""
        return [
            self.chunk(answer, {"delta": {"role": "assistant", "content": answer.echo}})
            for answer in self.answers
        ]

    def delta(self, answer: Answer, events: Sequence[Event], piece: Piece) -> Json | None:
        """The delta of a message, with log-probabilities if requested."""
        new: Json = {}
        for event in events:
            block = event.block
            if block.kind is Kind.CALL:
                if event.begins or event.text:
                    new.setdefault("tool_calls", []).append(_call_delta(event))
            else:
                name = _NAMES[block.kind]
                new[name] = new.get(name, "") + event.text
        if self.has_logprobs and piece.choices:
            return {"delta": new, "logprobs": self._logprobs(piece.choices)}
        return {"delta": new} if new else None

    def last_delta(self) -> Json:
        """An empty delta."""
        return {"delta": {}}

    def choice(self, answer: Answer) -> Json:
        """The message."""
        content, reasoning = answer.text(Kind.CONTENT), answer.text(Kind.REASONING)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := [_call(block) for block in answer.of(Kind.CALL)]:
            message |= {"content": content or None, "tool_calls": calls}
        logprobs = self._logprobs(answer.tokens) if self.has_logprobs else None
        return {"message": message, "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenChoice]) -> Json:
        return {"content": chat_logprobs(self.model.tokenizer, tokens), "refusal": None}


def _call_delta(event: Event) -> Json:
    """A part of a call; the first one says what is called."""
    block = event.block
    if event.begins:
        begun = Block(block.kind, [event.text], block.id, block.name)
        return {"index": block.number, **_call(begun)}
    return {"index": block.number, "function": {"arguments": event.text}}


def _call(block: Block) -> Json:
    function = {"name": block.name, "arguments": block.text}
    return {"id": block.id, "type": "function", "function": function}
