"""Synthetic drafts: EAGLE-3 of published sizes with random weights, for models of a shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.families.draft_file import MAP
from urdir.model.families.eagle3 import describe_eagle3
from urdir.model.families.shapes import Shape
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.files.opened import Tensor
from urdir.model.files.tensor_types import type_number

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.families.description import Description
    from urdir.model.families.reader import Reader


@dataclass(frozen=True, slots=True)
class DraftShape(Shape):
    """The sizes of an EAGLE-3 draft of ``tokens`` tokens of its own, whose embedding is the
    model's."""

    tokens: int = 0

    def stored(self) -> dict[str, tuple[int, ...]]:
        """See `Shape.stored`."""
        return {"output.weight": (self.tokens, self.hidden), MAP: (self.tokens,)}


#: Of https://huggingface.co/yuhuili/EAGLE3-LLaMA3.1-Instruct-8B.
DRAFT_SHAPES: Mapping[str, DraftShape] = {
    "eagle3-llama-3.1-8b": DraftShape(
        *("eagle3", 1, 4096, 32, 8, 128, 14336, 128256, False),
        {"rope.freq_base": 5e5, "target_layers": np.array([2, 16, 29], np.int32)},
        tokens=32_000,
    ),
}


class SyntheticDraft(SyntheticModel):
    """An EAGLE-3 draft of a shape, for the model ``target``. Its tokens are evenly spread over
    the model's."""

    def __init__(self, shape_name: str, target: Config, kind: str | None = None) -> None:
        self._target = target
        shape = DRAFT_SHAPES[shape_name]
        super().__init__(shape_name, kind, shape)
        tokens = np.linspace(0, target.vocab_size - 1, shape.tokens).astype(np.int64)
        data = tokens.view(np.uint8)
        self.tensors[MAP] = Tensor(MAP, type_number("I64"), tokens.shape, 0, data.nbytes, data)

    def _described(self, reader: Reader) -> Description:
        return describe_eagle3(reader, self._target)
