"""Rules: which operations, one after the other, a few launches compute together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from urdir.model.families.stored import StoredVector
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.lowering import Lowering
from urdir.ptxgen.spec import KernelSpec

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

#: Operations that a rule takes at most.
MOST_OPERATIONS = 24
#: Launches the operations and returns True, or refuses by limits: nothing is launched then.
Lower = Callable[[Lowering, Sequence[Op]], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """``takes`` names the kinds of operations by their words, in order; "*" repeats the word, or
    the words in parentheses, before it. A product that reads what the product before it reads,
    under the same label, is "beside" it."""

    takes: str
    lower: Lower

    @property
    def first(self) -> str:
        """The word of the first operation."""
        return self.takes.split()[0]

    def pattern(self) -> re.Pattern[str]:
        """The regular expression for words that are joined and ended by commas."""
        words = re.sub(r"[a-z_]+", r"(?:\g<0>,)", self.takes)
        return re.compile(words.replace(" ", ""))


def variants(takes: str, lower: Lower) -> list[Rule]:
    """Rules for all choices of the optional words, those with "?", the longest rule first."""
    words = takes.split()
    optional = [word.endswith("?") for word in words]
    choices = [
        (word.rstrip("?"), "") if o else (word,) for word, o in zip(words, optional, strict=True)
    ]
    found = (" ".join(filter(None, chosen)) for chosen in itertools.product(*choices))
    return [Rule(of, lower) for of in sorted(found, key=lambda of: -len(of.split()))]


class RuleBook:
    """Rules by their first word, in the order in which they are tried."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._by_word: dict[str, list[tuple[Rule, re.Pattern[str]]]] = {}
        for rule in rules:
            self._by_word.setdefault(rule.first, []).append((rule, rule.pattern()))
        self._known: dict[tuple[str, ...], Sequence[tuple[Rule, int]]] = {}

    def matches(self, words: tuple[str, ...]) -> Sequence[tuple[Rule, int]]:
        """The rules that match a prefix of ``words``, each with the number of words it takes."""
        if (found := self._known.get(words)) is None:
            text = "".join(f"{word}," for word in words)
            first = "product" if words[0] == "beside" else words[0]
            matched = ((rule, of.match(text)) for rule, of in self._by_word.get(first, ()))
            found = [(rule, match[0].count(",")) for rule, match in matched if match is not None]
            self._known[words] = found
        return found


def alone(word: str, lower: Callable[[Lowering, Any], None]) -> Rule:
    """The rule of an operation alone, which never refuses."""

    def lowered(at: Lowering, ops: Sequence[Op]) -> bool:
        (op,) = ops
        lower(at, op)
        return True

    return Rule(word, lowered)


def launched(word: str, kernel: Callable[[Any], KernelSpec]) -> Rule:
    """The rule of an operation that is one launch, of the ``kernel`` for it: parameters have the
    names of the operation's tensors and stored vectors, or of the vectors of its record ``of``.
    Those of several tensors are numbered, as several results are, y0, y1, ..."""

    def lower(at: Lowering, op: Op) -> None:
        spec, known = kernel(op), _arguments(op)
        at.launch(spec, op.label, **{p.name: _place(at, known[p.name]) for p in spec.params})

    return alone(word, lower)


def _arguments(op: Op) -> dict[str, object]:
    """What may be an argument, by its name."""
    own = {field.name: getattr(op, field.name) for field in fields(op)}
    record = own.get("of")
    found = {name: getattr(record, name) for name in getattr(record, "__slots__", ())} | own
    several = {name: of for name, of in own.items() if isinstance(of, tuple)}
    several |= {"y": op.makes} if len(op.makes) > 1 else {}
    for name, tensors in several.items():
        found |= {f"{name}{number}": tensor for number, tensor in enumerate(tensors)}
    return found


def _place(at: Lowering, of: object) -> Slice:
    assert isinstance(of, Tensor | StoredVector)
    return at.place(of) if isinstance(of, Tensor) else at.vector(of)


def words_of(ops: Sequence[Op]) -> list[str]:
    """The word of each operation, as in `Rule.takes`."""
    words = []
    last: Product | None = None
    for op in ops:
        if not isinstance(op, Product):
            words.append(op.word)
            continue
        beside = last is not None and last.x is op.x and last.label == op.label
        words.append("beside" if beside else op.word)
        last = op
    return words
