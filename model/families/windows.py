"""Sliding windows: which layers attend to a window of positions only, read from a file.

Keys: attention.sliding_window, and attention.sliding_window_pattern: a flag for each layer, or a
number n: in every n layers the last (or the first) attends globally.
"""

from __future__ import annotations

from urdir.model.errors import ConfigError
from urdir.model.families.reader import Reader

PATTERN = "attention.sliding_window_pattern"


def windowed_layers(file: Reader, period: int, *, full_first: bool = False) -> list[bool]:
    """Which layers have a window, by the file's pattern or the family's ``period``.

    A period of 0 gives every layer a window, one of 1 none (llama.cpp: `set_swa_pattern`).
    """
    if file.is_array(PATTERN):
        return flagged_layers(file)
    period = file.count(PATTERN, period)
    full = 0 if full_first else period - 1
    return [not period or layer % period != full for layer in file.described_layers]


def flagged_layers(file: Reader) -> list[bool]:
    """As `windowed_layers`, in families whose files must flag each layer."""
    if not file.is_array(PATTERN):
        raise ConfigError(f"metadata key '{file.key(PATTERN)}' must be an array")
    return file.by_layer(PATTERN, bool)


def optional_window(file: Reader) -> int:
    """attention.sliding_window; 0: no layer has one."""
    return file.count("attention.sliding_window")


def optional_windows(
    file: Reader, window: int, period: int, *, full_first: bool = False
) -> list[bool]:
    """`windowed_layers`, or False for all layers if ``window`` is 0."""
    if not window:
        return [False] * len(file.described_layers)
    return windowed_layers(file, period, full_first=full_first)
