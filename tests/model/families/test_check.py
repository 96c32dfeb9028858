"""References to rows and values that a tensor does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from urdir.model import demo_model
from urdir.model.errors import ConfigError
from urdir.model.families.check import check_tensors
from urdir.model.families.config import Config
from urdir.model.families.stored import Normalization
from urdir.model.files.gguf import Gguf


@pytest.mark.parametrize(
    ("part", "is_within"),
    [
        ((0, 4), True),
        ((-4, 4), True),  # from the end
        ((-4, 5), False),
        ((1, None), False),
    ],
)
@pytest.mark.parametrize("kind", ["rows", "values", "values of each period"])
def test_parts_beyond_a_tensor_are_refused(
    kind: str, part: tuple[int, int | None], is_within: bool
) -> None:
    with Gguf(demo_model()) as file:
        config = Config.of(file)
        changed = _changed(config, kind, *part)
        if is_within:
            check_tensors(changed, file)
        else:
            with pytest.raises(ConfigError, match="has fewer rows than the metadata require"):
                check_tensors(changed, file)


def _changed(config: Config, kind: str, first: int, size: int | None) -> Any:
    if kind == "rows":
        matrix, rows = config.output.matrix, config.output.matrix.rows
        output = replace(config.output, matrix=matrix.part(first % rows, size or rows))
        return replace(config, output=output)
    norm = config.output_norm
    assert norm is not None
    assert norm.weight is not None
    period = config.hidden if kind == "values" else config.hidden // 2
    weight = norm.weight.part(first % period, size or period, None if kind == "values" else period)
    return replace(config, output_norm=Normalization(norm.norm, weight))
