"""Changes of data that is a tree (JSON, or the values of a GGUF header), and of text."""

from __future__ import annotations

import copy
import random
from typing import Any

Rng = random.Random

#: Numbers at which something begins or ends.
NUMBERS = (
    *(0, 1, 2, 3, 7, 31, 32, 33, 64, 255, 256, 257, 4095, 4096, 4097, 65_535, 1 << 20, 1 << 22),
    *(
        2**31 - 2,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**53,
        2**63 - 1,
        2**63,
        2**64 - 1,
        -1,
        -2,
        -(2**31),
    ),
    *(-(2**63), 0.0, -0.0, 0.5, 1e-320, 1e-45, 1e38, 1e39, 1e308, float("inf"), float("nan")),
)
STRINGS = (
    "", " ", "\0", "\n", "a" * 63, "a" * 64, "a" * 4097, "é", "▁", "\ud7ff", "\U0010ffff", "<0x0A>",
    "<|im_end|>", "</s>", "../x", "/dev/zero", "%s", "{}", "llama", "gpt2", "\x1b[31m", "'", '"',
)  # fmt: skip


def paths(tree: Any, limit: int = 4000) -> list[tuple[Any, Any]]:
    """(container, key) of every value below ``tree``, at most so many."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(found) < limit:
        container = waiting.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            found.append((container, key))
            if isinstance(value, dict | list):
                waiting.append(value)
    return found[:limit]


def other(rng: Rng, value: Any) -> Any:
    """Something in the place of a value: near it, of its kind, or of any."""
    kind = rng.randrange(4)
    if kind == 0 and isinstance(value, str):
        return text(rng, value)
    if kind <= 1 and isinstance(value, int | float) and not isinstance(value, bool):
        return value + rng.choice((-1, 1)) if kind else rng.choice(NUMBERS)
    if kind <= 1 and isinstance(value, list) and value:
        changed = list(value)
        at = rng.randrange(len(changed))
        edit = rng.randrange(4)
        if edit == 0:
            del changed[at]
        elif edit == 1:
            changed.insert(at, changed[rng.randrange(len(changed))])
        elif edit == 2:
            changed = changed[:at]
        else:
            changed *= rng.choice((2, 3))
        return changed
    anything = (None, True, False, [], {}, [[]], [value], {"type": value})
    return rng.choice((*anything, rng.choice(NUMBERS), rng.choice(STRINGS)))


def changed(rng: Rng, tree: Any) -> Any:
    """A copy of a tree with one to four changes."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 4)):
        places = paths(tree)
        if not places:
            break
        container, key = rng.choice(places)
        edit = rng.randrange(6)
        if edit == 0 and isinstance(container, dict):
            del container[key]
        elif edit == 1:
            source, name = rng.choice(places)
            container[key] = copy.deepcopy(source[name])
        elif edit == 2 and isinstance(container, dict):
            container[text(rng, str(key))] = container.pop(key)
        else:
            container[key] = other(rng, container[key])
    return tree


def claimed(rng: Rng, values: dict[Any, Any]) -> dict[Any, Any]:
    """Several integers are the same number: what is checked of one with another then fits."""
    number = rng.choice((1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28, 2**31 - 2, -2))
    return {
        key: number if type(value) is int and rng.random() < 0.5 else value
        for key, value in values.items()
    }


def text(rng: Rng, old: str) -> str:
    """A text with a few changes: parts cut, doubled, moved, and known strings put in."""
    for _ in range(rng.randint(1, 3)):
        a, b = sorted((rng.randint(0, len(old)), rng.randint(0, len(old))))
        b = min(b, a + 40)
        edit = rng.randrange(5)
        if edit == 0:
            old = old[:a] + old[b:]
        elif edit == 1:
            old = old[:b] + old[a:b] * rng.choice((1, 2, 50)) + old[b:]
        elif edit == 2:
            old = old[:a] + rng.choice(STRINGS) + old[b:]
        elif edit == 3:
            at = rng.randint(0, len(old))
            old = old[:at] + old[a:b] + old[at:]
        else:
            old = (
                old[:a] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF)))) + old[b:]
            )
    return old


def raw(rng: Rng, data: bytes) -> bytes:
    """Bytes with a few changes that know nothing of what they mean."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not changed:
            break
        at = rng.randrange(len(changed))
        edit = rng.randrange(4)
        if edit == 0:
            changed[at] = rng.randrange(256)
        elif edit == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif edit == 2:
            del changed[at : at + rng.choice((1, 4, 8, 1000))]
        else:
            number = rng.choice([n for n in NUMBERS if isinstance(n, int)])
            changed[at : at + 8] = (number & (2**64 - 1)).to_bytes(8, "little")
    return bytes(changed)
