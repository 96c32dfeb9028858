"""What flags take: argparse types that check a value while it is parsed."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: an integer within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        _check_bounds(value, low, high)
        return value

    return parse


#: first-last, first-last+step or first-last*factor
_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")


def number_list(low: int) -> Callable[[str], tuple[int, ...]]:
    """An argparse type: whole numbers from ``low`` on between commas, and ranges as llama-bench
    takes them: 1-4, 16-64+16, 16-256*2."""
    number = whole_number(low)

    def parse(text: str) -> tuple[int, ...]:
        found: list[int] = []
        for part in text.split(","):
            if (match := _RANGE.fullmatch(part)) is None:
                found.append(number(part))
                continue
            first, last, by = number(match[1]), number(match[2]), int(match[4] or 1)
            if (
                first > last
                or by < (2 if match[3] == "*" else 1)
                or (match[3] == "*" and not first)
            ):
                raise argparse.ArgumentTypeError(f"{part!r} is a range without an end")
            while first <= last:
                found.append(first)
                first = first * by if match[3] == "*" else first + by
        return tuple(found)

    return parse


def adapters(text: str) -> list[tuple[str, float]]:
    """An argparse type: files of adapters between commas, each times 1."""
    files = text.split(",")
    if not all(files):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return [(file, 1.0) for file in files]


def scaled_adapters(text: str) -> list[tuple[str, float]]:
    """An argparse type: FILE:SCALE between commas."""
    found = []
    for part in text.split(","):
        file, _, scale = part.rpartition(":")
        try:
            number = float(scale)
        except ValueError:
            number = math.nan
        if not file or not math.isfinite(number):
            raise argparse.ArgumentTypeError(f"{part!r} is not FILE:SCALE, with a number")
        found.append((file, number))
    return found


def rank_and_count(text: str) -> tuple[int, int]:
    """An argparse type: RANK, or RANKxCOUNT."""
    rank, _, count = text.partition("x")
    number = whole_number(1, 1024)
    return number(rank), number(count or "1")


def number_pair(text: str) -> tuple[int, int]:
    """An argparse type: two numbers, both at least 1."""
    numbers = number_list(1)(text)
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not PP,TG")
    return numbers[0], numbers[1]


def number_or_span(text: str) -> tuple[int, int]:
    """An argparse type: how many, or the fewest and the most: 2; 1-4."""
    first, dash, last = text.partition("-")
    least = whole_number(0 if dash else 1)(first)
    most = whole_number(1)(last) if dash else least
    if most < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN-MAX")
    return least, most


def real_number(low: float, high: float | None = None) -> Callable[[str], float]:
    """An argparse type: a finite number within bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not finite")
        _check_bounds(value, low, high)
        return value

    return parse


def routing(text: str) -> float | Literal["locality"]:
    """How experts are chosen at random: a share of all choices, or "locality"."""
    if text == "locality":
        return "locality"
    try:
        float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a share such as 0.9, or locality") from None
    return real_number(0.5, 0.99)(text)


def byte_size(text: str) -> int:
    """Bytes: a number, and K, M or G for powers of 1,024."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, such as 512M or 16G")
    number, unit = match.groups()
    return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit.upper()]


def token_limit(text: str) -> int | None:
    """An argparse type: tokens to generate at most; None, at no length, for -1 and -2."""
    value = whole_number(-2)(text)
    if not value:
        raise argparse.ArgumentTypeError("0 tokens are no answer: give 1 or more, or -1")
    return None if value < 0 else value


def names(text: str) -> list[str]:
    """An argparse type: names between commas."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return found


def origins(text: str) -> list[str]:
    """An argparse type: origins of pages between commas, as browsers send them; "*" for all, and
    llama-server's "localhost" for those of this machine."""
    found = [name.rstrip("/") for name in names(text)]
    for name in found:
        if not re.fullmatch(r"\*|localhost|null|[a-z][a-z0-9+.-]*://[^/\s]+", name):
            raise argparse.ArgumentTypeError(
                f"{name!r} is not an origin such as https://app.example.org, nor * or localhost"
            )
    return found


def host_name(text: str) -> str:
    """An argparse type: a host as a URL has it, without its port."""
    if not re.fullmatch(r"\[[0-9a-fA-F:.]+\]|[^\s:/]+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name such as models.example.org: leave scheme and port out"
        )
    return text


def sequences(text: str) -> int | None:
    """An argparse type: how many sequences at once; None for -1, as many as usual."""
    return None if text == "-1" else whole_number(1, 1024)(text)


def bias(text: str) -> tuple[int, float]:
    """An argparse type: a token id and what is added to its logit, as llama.cpp writes them."""
    found = re.fullmatch(r"(\d+)([+-].+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID+BIAS or ID-BIAS")
    return int(found[1]), real_number(-100, 100)(found[2])


def text(given: str) -> str:
    """An argparse type: text. Bytes that the locale's encoding does not have (ASCII) are UTF-8."""
    try:
        return given.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as exc:
        byte = exc.object[exc.start]
        raise argparse.ArgumentTypeError(f"not UTF-8: byte {exc.start} is {byte:#04x}") from None
    except UnicodeEncodeError as exc:  # on Windows
        raise argparse.ArgumentTypeError(f"character {exc.start} is half of one") from None


def stop_text(given: str) -> str:
    """An argparse type: a text that ends an answer."""
    if not given:
        raise argparse.ArgumentTypeError("an empty text would end every answer")
    return text(given)


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: names and values in JSON."""
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {exc}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"name": 1}}')
    return found


def seed(text: str) -> int | None:
    """An argparse type: a random seed; None, a new one, for -1."""
    value = whole_number(-1, 2**64 - 1)(text)
    return None if value < 0 else value


#: Where a tensor lies, by llama.cpp's names: whether that is host memory.
_PLACES = {"CPU": True, "CUDA_HOST": True, "CUDA0": False, "GPU": False}


def gpu_layers(text: str) -> int | None:
    """An argparse type: the fewest layers of a list of numbers; None for all of them."""
    numbers = [
        None if part in ("all", "auto", "-1") else whole_number(0)(part) for part in text.split(",")
    ]
    return min((number for number in numbers if number is not None), default=None)


def overrides(text: str) -> list[tuple[str, bool]]:
    """An argparse type: patterns of tensors between commas, and whether they lie on the host."""
    found = []
    for part in text.split(","):
        pattern, equals, place = part.rpartition("=")
        if not equals or place.upper() not in _PLACES:
            raise argparse.ArgumentTypeError(f"{part!r}: expected PATTERN=CPU or PATTERN=CUDA0")
        found.append((pattern, _PLACES[place.upper()]))
    return found


def gpus(text: str) -> int | tuple[int, ...]:
    """An argparse type: how many GPUs, or the ordinals of some between commas: 2; 0,3."""
    if "," not in text:
        return whole_number(1)(text)
    ordinals = number_list(0)(text.rstrip(","))
    if len({*ordinals}) != len(ordinals):
        raise argparse.ArgumentTypeError(f"{text!r} names a GPU twice")
    return ordinals


def device(text: str) -> str:
    """An argparse type: auto, cuda[:i] or emulator[:sm_NN]; llama.cpp's CUDA0 is cuda:0."""
    from urdir.driver.device_name import DeviceName
    from urdir.driver.errors import DeviceNameError

    name = re.sub(r"CUDA(\d+)", r"cuda:\1", text)
    try:
        DeviceName.parse(name)
    except DeviceNameError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    return name


def _check_bounds(value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise argparse.ArgumentTypeError(f"{value} must be {wanted}")


class Urls:
    """The choices of a flag whose value may be left out: words that are URLs."""

    def __contains__(self, word: str) -> bool:
        return "://" in word

    def __iter__(self) -> Iterator[str]:
        """For argparse, which names them where a word is none of them."""
        yield "http://HOST:PORT"
