"""Attention over a chunk of a prompt: small specs, their inputs, and outputs that are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prompt import PromptAttention
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores

Inputs = dict[str, Any]
IDLE = 0xFFFFFFFF


def prefill_of(kind: Any, heads: int, rows: int, fields: dict[str, Any]) -> Any:
    """A spec; ``fields`` are the layout's or the scores'."""
    layout: dict[str, Any] = {
        "sequences": 1, "kv_heads": 1, "dtype": "f16", "page_len": 0, "pages": 0, "value_dim": 0,
        "capacity": 0,
    }  # fmt: skip
    names = {of.name for of in dataclasses.fields(KvLayout)}
    layout |= {name: value for name, value in fields.items() if name in names}
    scores = Scores(**{name: value for name, value in fields.items() if name not in names})
    return kind(heads, KvLayout(**layout), rows, scores)


def chunk(spec: PromptAttention, start: int, live: int | None = None) -> Inputs:
    """Inputs of a chunk from position ``start`` on, its rows after ``live`` idle."""
    live = spec.rows if live is None else live
    positions = [start + r if r < live else IDLE for r in range(spec.rows)]
    return attention_inputs(spec, np.random.default_rng(start), positions, [0] * spec.rows)


def run(device: Device, spec: PromptAttention, inputs: Inputs) -> Any:
    """The output, which is checked; test_attention_fields.py checks the reference."""
    outputs = run_kernel(device, spec, inputs)
    compare(spec, outputs, spec.reference(**inputs))
    return outputs["out"]


def check_chunks(
    device: Device, whole: PromptAttention, start: int, parts: Sequence[tuple[int, int]]
) -> None:
    """The rows of ``whole`` have the same bits in chunks of so many rows, so many of them live."""
    inputs = chunk(whole, start)
    expected = run(device, whole, inputs)
    at = 0
    for rows, live in parts:
        position = np.full(rows, IDLE, np.uint32)
        position[:live] = inputs["position"][at : at + live]
        some = {
            **inputs,
            **({"count": np.uint32(rows)} if "count" in inputs else {}),
            "q": np.resize(inputs["q"][at : at + live], (rows, *inputs["q"].shape[1:])),
            "sequence": inputs["sequence"][:rows],
            "position": position,
        }
        out = run(device, dataclasses.replace(whole, rows=rows), some)
        np.testing.assert_array_equal(out[:live], expected[at : at + live])
        at += live
    assert at == whole.rows
