"""Kinds of command-line flags, and their declaration to argparse.

`llama_flags.FLAGS` is the table of llama.cpp flags. A flag is served, accepted with a warning on
stderr because it has no effect here, or refused with the nearest alternative.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

#: Arguments of an accepted or refused flag: none, a value, or an optional value.
NOTHING, VALUE, PERHAPS = 0, None, "?"
_SWITCH = ("on", "off", "auto")


@dataclass(frozen=True, slots=True)
class Served:
    """A flag with the same effect as in llama.cpp.

    ``names`` are separated by blanks. ``groups`` are the groups of flags that it belongs to
    (`add_flags`). ``options`` are those of `add_argument`. Flags with the same ``one_of`` are
    mutually exclusive.
    """

    names: str
    groups: tuple[str, ...]
    help: str
    options: Mapping[str, Any] = field(default_factory=dict)
    one_of: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A flag without effect here; ``why`` is the reason. ``values``: allowed ones (None: any)."""

    names: str
    groups: tuple[str, ...]
    why: str
    takes: int | str | None = NOTHING
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """An unsupported flag whose effect matters. ``why`` names what is missing, and the nearest
    alternative. A value of ``off`` needs no support, so it is accepted."""

    names: str
    groups: tuple[str, ...]
    why: str
    takes: int | str | None = VALUE
    off: float | None = None


Flag = Served | Accepted | Refused


def add_flags(
    parser: argparse._ActionsContainer, flags: Iterable[Flag], group: str, **changed: Any
) -> None:
    """Declare those of ``flags`` that belong to ``group``. The help shows only served flags.
    ``changed`` options override those of the table; the help does not show a changed default."""
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
    """Base of the actions for flags of the table."""

    def __init__(self, flag: _Flag, **options: Any) -> None:
        super().__init__(**options)
        self.flag: _Flag = flag


class _Accept(FlagAction[Accepted]):
    """Warn that a flag has no effect, and why."""

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
    """End the command with an error, unless the value is ``off``."""

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
