"""Kinds of flags, and how argparse gets to know them.

The flags of llama.cpp are `llama_flags.FLAGS`. Each is served, accepted with a line on stderr
because it changes nothing here, or refused with what comes nearest to it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

#: What a flag that is accepted or refused takes: nothing, a value, or a value that may be missing.
NOTHING, VALUE, PERHAPS = 0, None, "?"
_SWITCH = ("on", "off", "auto")


@dataclass(frozen=True, slots=True)
class Served:
    """A flag that does what it does in llama.cpp.

    ``names`` with a blank between them, the groups of flags that it belongs to (`add_flags`),
    ``options`` as `add_argument` takes them. Flags with the same ``one_of`` exclude each other.
    """

    names: str
    groups: tuple[str, ...]
    help: str
    options: Mapping[str, Any] = field(default_factory=dict)
    one_of: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A flag without meaning here: ``why``. ``values`` are those it may have (None: any)."""

    names: str
    groups: tuple[str, ...]
    why: str
    takes: int | str | None = NOTHING
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag that matters and is not there: ``why`` says what there is none of, and what comes
    nearest. A value of ``off`` asks for nothing."""

    names: str
    groups: tuple[str, ...]
    why: str
    takes: int | str | None = VALUE
    off: float | None = None


Flag = Served | Accepted | Refused


def add_flags(
    parser: argparse._ActionsContainer, flags: Iterable[Flag], group: str, **changed: Any
) -> None:
    """Declare those of ``flags`` that belong to ``group``; only served ones are in the help.
    ``changed`` options replace theirs, and a default that is changed is not in the help."""
    exclusive: dict[str, argparse._MutuallyExclusiveGroup] = {}
    for flag in flags:
        if group not in flag.groups:
            continue
        names = flag.names.split()
        if isinstance(flag, Served):
            to: argparse._ActionsContainer = parser
            if flag.one_of:
                if flag.one_of not in exclusive:
                    exclusive[flag.one_of] = parser.add_mutually_exclusive_group()
                to = exclusive[flag.one_of]
            text = flag.help.partition(" (default")[0] if "default" in changed else flag.help
            to.add_argument(*names, **{"help": text, **flag.options, **changed})
            continue
        choices = _SWITCH if flag.takes == PERHAPS else None
        parser.add_argument(
            *names,
            action=_Accept if isinstance(flag, Accepted) else _Refuse,
            nargs=flag.takes,
            choices=choices,
            flag=flag,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


_Flag = TypeVar("_Flag", Accepted, Refused)


class FlagAction(argparse.Action, Generic[_Flag]):
    """What is done for a flag of the table."""

    def __init__(self, flag: _Flag, **options: Any) -> None:
        super().__init__(**options)
        self.flag: _Flag = flag


class _Accept(FlagAction[Accepted]):
    """Says why a flag changes nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self.flag.values is not None and values not in self.flag.values:
            parser.error(
                f"{option_string} {values}: only {', '.join(self.flag.values)} is possible: "
                f"{self.flag.why}"
            )
        print(f"{parser.prog}: {option_string} changes nothing: {self.flag.why}", file=sys.stderr)


class _Refuse(FlagAction[Refused]):
    """Ends the command, unless the flag asks for nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self.flag.off is not None and _number(values) == self.flag.off:
            return
        parser.error(f"{option_string}: there is no {self.flag.why}")


def _number(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None
