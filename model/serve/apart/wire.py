"""Messages between a front end and the engine's process: MessagePack behind its length.

A front end sends calls; the engine sends one round for each front end and step.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from urdir.driver.errors import DeviceNameError, DriverError, OutOfMemoryError
from urdir.model import errors
from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Item, Piece, Request, TokenChoice
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.memory.scored_rows import TokenScores
from urdir.model.serve.kept import Action
from urdir.model.text.constraints import Constraint
from urdir.model.text.thought_limit import ThoughtLimit
from urdir.ptxgen.errors import PtxgenError, SettingError

log = logging.getLogger("urdir.serve")
_LENGTH = struct.Struct("<I")

# ---- from either side ----


@dataclass(frozen=True, slots=True)
class Failure:
    """An error: the name of its class, if front ends know that, and its words."""

    kind: str
    words: str
    retry_after: float = 0.0

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The message for an error; one that no client may read is logged here."""
        return cls._of(error, _KINDS)

    @classmethod
    def of_end(cls, error: BaseException) -> Failure:
        """The message for what ends a process; one that the command does not report is logged."""
        if isinstance(error, OutOfMemoryError):
            error = errors.NoRoomError(str(error))
        return cls._of(error, _ENDS)

    @classmethod
    def _of(cls, error: BaseException, kinds: Mapping[str, object]) -> Failure:
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in kinds), "")
        if not kind:
            log.error("the engine: %s", error, exc_info=error)
        return cls(kind, str(error), getattr(error, "retry_after", 0.0))

    @property
    def cause(self) -> BaseException:
        """What ended a process."""
        if self.kind in _KINDS or not self.kind:
            return self.error
        return _ENDS[self.kind](self.words)

    @property
    def error(self) -> Exception:
        """The error to raise."""
        if self.kind == "BusyError":
            return errors.BusyError(self.words, self.retry_after)
        return _KINDS.get(self.kind, RuntimeError)(self.words)


#: Errors that a front end tells apart (`serve.errors`), by their names.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(errors.ModelError, errors.BusyError, errors.ContextFullError, errors.ConstraintError),
        *(errors.SettingsError, errors.UnsupportedError, errors.TokenizerError),
        *(errors.PrefixFileError, errors.NoRoomError),
        *(errors.TemplateError, errors.NoTemplateError, errors.HubNameError),
        *(DriverError, DeviceLostError),
    )
}
#: Errors that the command tells apart (`cli`).
_ENDS: dict[str, type[BaseException]] = {
    **_KINDS,
    **{
        kind.__name__: kind
        for kind in (KeyboardInterrupt, DeviceNameError, PtxgenError, SettingError, OSError)
    },
}


# ---- from a front end ----


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The front end has the model's texts, and waits for `Round.context`; or it has none."""

    failure: Failure | None = None


class Ask(msgspec.Struct, tag=True, array_like=True):
    """A request, by a number of the front end's; the fields are those of `Request` that concern an
    engine."""

    number: int
    prompt: tuple[int, ...]
    settings: SamplingSettings
    limit: int | None
    ignore_end: bool
    constraint: Constraint | None
    thoughts: ThoughtLimit | None
    scope: bytes
    drafts: bool
    draft_p_min: float | None
    adapters: tuple[tuple[str, float], ...] | None
    source: tuple[int, ...]
    prompt_logprobs: int | None

    @classmethod
    def of(cls, number: int, request: Request) -> Ask:
        """The message for a request."""
        fields = (getattr(request, name) for name in cls.__struct_fields__[1:])
        return cls(number, *fields)

    @property
    def request(self) -> Request:
        """The request, which has no stop strings here."""
        return Request(**{name: getattr(self, name) for name in self.__struct_fields__[1:]})


class Expect(msgspec.Struct, tag=True, array_like=True):
    """A request is being read; nothing else is open here."""


class Stop(msgspec.Struct, tag=True, array_like=True):
    """A stop string was found."""

    number: int


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """The client is gone."""

    number: int


class Check(msgspec.Struct, tag=True, array_like=True):
    """Compile a constraint; the answer is an empty `Update`, or a failure."""

    number: int
    constraint: Constraint


class Query(msgspec.Struct, tag=True, array_like=True):
    """The answer has the metrics, or a failure."""

    number: int


class Slot(msgspec.Struct, tag=True, array_like=True):
    """The answer has what was done, or a failure."""

    number: int
    action: SlotAction


class Scales(msgspec.Struct, tag=True, array_like=True):
    """The answer has the LoRA adapters, after their scales are set, if given; or a failure."""

    number: int
    scales: dict[int, float] | None


class Keep(msgspec.Struct, tag=True, array_like=True):
    """An action on what front ends keep together; the answer has what `Store.do` returns."""

    number: int
    action: Action
    name: bytes
    value: bytes = b""
    start: int = 0


Call = Ready | Expect | Ask | Stop | Cancel | Check | Query | Keep | Slot | Scales

# ---- from the engine ----


class Update(msgspec.Struct, array_like=True, omit_defaults=True):
    """What is new of one call: tokens, with log-probabilities where these are wanted, and how it
    ended. ``scores`` are those of `Piece`: the number of tokens, and the bytes of both arrays."""

    number: int
    tokens: tuple[int, ...] = ()
    likely: tuple[tuple[float | None, tuple[tuple[int, float], ...]], ...] = ()
    scores: tuple[tuple[int, bytes, bytes], ...] = ()
    ending: Ending | None = None
    failure: Failure | None = None
    metrics: Metrics | None = None
    done: SlotDone | None = None
    adapters: tuple[AdapterScale, ...] = ()
    kept: bytes | None = None

    @classmethod
    def of(cls, number: int, item: Item) -> Update:
        """The message for an item of an answer."""
        if isinstance(item, Piece):
            choices = item.choices
            tokens = tuple([choice.token for choice in choices])
            scores = tuple([of.packed() for of in item.scores])
            if choices and choices[0].logprob is not None:
                likely = tuple((each.logprob, each.top) for each in choices)
                return cls(number, tokens, likely, scores)
            return cls(number, tokens, scores=scores)
        if isinstance(item, Ending):
            return cls(number, ending=item)
        return cls(number, failure=Failure.of(item))

    def items(self) -> Iterator[Item]:
        """The items of an answer."""
        scores = tuple([TokenScores.unpacked(*of) for of in self.scores])
        if self.likely:
            pairs = zip(self.tokens, self.likely, strict=True)
            choices = tuple(TokenChoice(token, *likely) for token, likely in pairs)
            yield Piece("", choices, scores)
        elif self.tokens or scores:
            yield Piece("", tuple([TokenChoice(token) for token in self.tokens]), scores)
        if self.ending is not None:
            yield self.ending
        if self.failure is not None:
            yield self.failure.error


class Round(msgspec.Struct, array_like=True, omit_defaults=True):
    """What a step brought to the calls of one front end, or an order to it.

    The first round has the model's ``context``: from then on requests are taken. "drain": answer
    what is open, then end; "abort": end.
    """

    updates: list[Update] = []
    context: int = 0
    order: Literal["", "drain", "abort"] = ""


_encoder = msgspec.msgpack.Encoder()
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_round = msgspec.msgpack.Decoder(Round).decode


def frame(message: Call | Round) -> bytes:
    """A message as it is sent. Raises ModelError for one that is too long."""
    body = _encoder.encode(message)
    if len(body) >= 1 << 32:
        raise errors.ModelError(f"a request of {len(body):,} bytes is too long")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Takes what arrives apart into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> list[bytes]:
        """The bodies of the messages that are complete with ``data``."""
        buffer, bodies, at = self._buffer, [], 0
        buffer += data
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return bodies
