"""All rules, in the order in which they are tried: those of more operations first."""

from __future__ import annotations

from urdir.model.lower import attention, collectives, linear, stream
from urdir.model.lower.rule import RuleBook

#: What a step is lowered by.
RULES = RuleBook((*attention.RULES, *linear.RULES, *collectives.RULES, *stream.RULES))
