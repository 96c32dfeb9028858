"""Text summary of a description: one line for the model, a few per kind of layer."""

from __future__ import annotations

from typing import Any

from urdir.model.families.description import Description
from urdir.model.families.facts import Facts, layer_groups, model_facts


def summary(description: Description) -> str:
    """Summarise a model: one line for the whole, a few for each kind of layer."""
    lines = [line for group in layer_groups(description) for line in layer_lines(group)]
    return "\n".join([fact_text(model_facts(description)), *lines])


def layer_lines(group: Facts) -> list[str]:
    """A group of layers as text: a line with their numbers, one line per network."""
    plural = "s" if len(group["layers"]) > 1 else ""
    lines = [f"layer{plural} {_ranges(group['layers'])}:"]
    for networks in group["blocks"]:
        for number, facts in enumerate(networks):
            lines.append(f"  {'beside it ' if number else ''}{fact_text(facts)}")
    end = {key: value for key, value in group.items() if key not in ("layers", "blocks")}
    return [*lines, f"  then {fact_text(end)}"] if end else lines


def fact_text(facts: Facts) -> str:
    """ "attention, heads 32, sinks": true values and the kind are given by name alone."""
    parts = []
    for key, value in facts.items():
        name = key.replace("_", " ")
        if key == "kind":
            parts.append(value)
        elif isinstance(value, dict):
            parts.append(f"{name} ({fact_text(value)})")
        else:
            parts.append(name if value is True else f"{name} {_value(value)}")
    return ", ".join(parts)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ranges(numbers: list[int]) -> str:
    """ "0-3, 7": ascending numbers, consecutive ones as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
