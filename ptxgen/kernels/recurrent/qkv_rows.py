"""How q, k and v lie in the rows of a recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Order = Literal["qkv", "vkq", "apart"]


@dataclass(frozen=True, slots=True)
class QkvRows:
    """Rows of ``keys`` values of q, as many of k, and ``values`` of v: one array has them in that
    ``order``; "apart", they are arrays of their own. The maps have "q", "k" and "v"."""

    order: Order
    keys: int
    values: int

    @property
    def width(self) -> int:
        """Values per row of all three."""
        return 2 * self.keys + self.values

    @property
    def arrays(self) -> Mapping[str, str]:
        """The parameters that have them."""
        return {name: f"{name}_heads" if self.order == "apart" else "mixed" for name in "qkv"}

    @property
    def offsets(self) -> Mapping[str, int]:
        """Their start in a row, in values."""
        match self.order:
            case "qkv":
                return {"q": 0, "k": self.keys, "v": 2 * self.keys}
            case "vkq":
                return {"v": 0, "k": self.values, "q": self.values + self.keys}
            case "apart":
                return dict.fromkeys("qkv", 0)

    @property
    def strides(self) -> Mapping[str, int]:
        """From row to row, in values."""
        if self.order != "apart":
            return dict.fromkeys("qkv", self.width)
        return {"q": self.keys, "k": self.keys, "v": self.values}
