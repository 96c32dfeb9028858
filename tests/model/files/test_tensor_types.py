"""The table of ggml's tensor types against that of the gguf package."""

from __future__ import annotations

from gguf.constants import GGML_QUANT_SIZES

from urdir.model.files.tensor_types import TENSOR_TYPES, type_number


def test_types_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {number: (of.name, of.block, of.nbytes) for number, of in TENSOR_TYPES.items()}
    assert {number: ours.get(number) for number in theirs} == theirs


def test_names_lead_back_to_numbers() -> None:
    assert [type_number(of.name) for of in TENSOR_TYPES.values()] == list(TENSOR_TYPES)
