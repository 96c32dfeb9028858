"""Examples of attention kernels with other types of caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

S = TypeVar("S")


def with_caches(examples: Mapping[str, S], others: Mapping[str, str]) -> dict[str, S]:
    """``examples``, specs with a KvLayout, then those named in ``others`` with caches of other
    types: "fp8", or "q8_0 q4_0", of keys and values."""
    more: dict[str, S] = {}
    for name, types in others.items():
        spec: Any = examples[name]
        keys, *values = types.split()
        layout = replace(spec.layout, dtype=keys, value_dtype=values[0] if values else None)
        more[f"{name}, {types}"] = replace(spec, layout=layout)
    return {**examples, **more}
