"""Specs from text: every type of field, records part by part, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from urdir.ptxgen.catalog import kernel, kernels
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.experts.gemm import ExpertsGemm
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.products.gemv_f32 import GemvF32
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.kernels.read_stream import ReadStream
from urdir.ptxgen.kernels.rotation import Rotation
from urdir.ptxgen.render.kernel import field_values
from urdir.ptxgen.spec import Access, KernelSpec, LaunchShape, Param, purpose_of, smallest_example
from urdir.ptxgen.tools.settings import SettingError, fields_of, plain, respecialise, specialise
from urdir.ptxgen.weights.formats import FORMATS


def test_each_type_of_field() -> None:
    spec = specialise(GemvF32, ["format=q4_k", "rows=64", "cols=256", "bias=true"])
    assert spec == GemvF32.of(FORMATS["Q4_K"], 64, 256, Bias())
    assert specialise(Normalise, ["cols=33", "norm.eps=1e-6"]) == Normalise(
        1, 33, Norm("rms", 1e-6)
    )
    assert specialise(Advance, ["sampling=no"]).sampling is False
    layout = specialise(PrepareTokens, ["layout.dtype=bf16"]).layout
    assert layout.dtype == "bf16"


def test_steps_of_a_product_are_named_by_their_stems() -> None:
    """As the first example has them that has one of that name."""
    scaled = specialise(Gemv, ["residual.scale=0.5", "cols=512", "format=Q4_K"])
    assert scaled.epilogue == (Residual(0.5),)
    assert specialise(Gemv, ["epilogue.residual=no", "rows=5"]).epilogue == ()
    normed = specialise(GemvF32, ["norm.eps=0.25"])
    assert normed.steps.norm == Norm("rms", 0.25)
    assert respecialise(normed, ["norm=no"]).prologue == ()
    with pytest.raises(SettingError, match="scale=much: not float"):
        specialise(Gemv, ["residual.scale=much"])
    with pytest.raises(SettingError, match="no field 'gate'"):
        respecialise(smallest_example(Gemv), ["gate=yes"])


def test_unset_fields_are_the_first_examples() -> None:
    first = smallest_example(GemvF32)
    assert specialise(GemvF32) == first
    assert specialise(GemvF32, ["rows=5"]) == GemvF32(first.format, 5, first.cols)


def test_records_are_set_part_by_part_and_all_at_once() -> None:
    assert specialise(PrepareTokens, ["layout.head_dim=128"]).layout.head_dim == 128
    assert specialise(PrepareTokens, ["head_dim=128"]).layout.head_dim == 128
    paged = specialise(
        PrepareTokens, ["max_len=64", "page_len=16", "pages=7"]
    ).layout  # no order works
    assert (paged.max_len, paged.page_len, paged.pages) == (64, 16, 7)
    tiled = specialise(
        ExpertsGemm,
        ["height=16", "tile.batch=16", "tile.rows=32", "tile.units=4", "tile.warps_batch=1"],
    )
    assert tiled.tile is not None
    assert tiled.tile.units == 4
    assert specialise(ExpertsGemm, ["tile=none"]).tile is None
    with pytest.raises(SettingError, match="batch, units"):
        respecialise(smallest_example(ExpertsGemm), ["tile.rows=32"])
    of_another = specialise(ExpertsGemm, ["tile.rows=32"]).tile  # of an example that has one
    assert of_another is not None
    assert of_another.rows == 32
    assert specialise(IncrementalAttention, ["scores.scale=none"]).scores.scale is None
    assert specialise(IncrementalAttention, ["scores.scale=0.5"]).scores.scale == 0.5
    rotated = specialise(
        IncrementalAttention,
        ["head_dim=64", "token.rope.rotary_dim=48", "token.rope.style=half", "token.appends=no"],
    )
    assert rotated.token == OwnToken(Rotation(48, "half"), appends=False)


@pytest.mark.parametrize(
    ("kernel", "setting", "message"),
    [
        (GemvF32, "nothing", "field=value"),
        (GemvF32, "width=3", "no field 'width'"),
        (GemvF32, "rows=many", "rows=many: not int"),
        (GemvF32, "rows=1.5", "not int"),
        (GemvF32, "bias=perhaps", "not bool"),
        (GemvF32, "format=Q9_9", "Q4_K"),
        (PrepareTokens, "layout.dtype=f24", "bf16"),
        (PrepareTokens, "layout=3", "layout.head_dim"),
        (Normalise, "norm.eps=small", "not float"),
        (Normalise, "norm.eps=nan", "eps=nan: not a finite number"),
    ],
)
def test_what_is_no_setting_is_refused_in_one_line(
    kernel: type[KernelSpec], setting: str, message: str
) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        specialise(kernel, [setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kernel", "setting", "message"),
    [
        (Normalise, "cols=1000000000", "1 to 1048576"),
        (GemvF32, "rows=0", "a matrix of 0 x 32"),
        (GemvF32, "cols=-1", "a matrix of 3 x -1"),
        (GemvF32, "stages=-1", "stages is -1"),
        (ReadStream, "threads=0", "threads is 0: 1 to 1024"),
        (ReadStream, "unroll=1000", "unroll is 1000: 1 to 16"),
    ],
)
def test_kernels_refuse_sizes_by_name(kernel: type[KernelSpec], setting: str, message: str) -> None:
    with pytest.raises(PtxgenError, match=message):
        specialise(kernel, [setting])


def test_numbers_that_make_no_launch_are_refused() -> None:
    with pytest.raises(SettingError, match=r"a grid of .*, where \(1, 1, 1\) to"):
        specialise(Add, ["n=99999999999999999999"])


@dataclass(frozen=True)
class Unchecked(KernelSpec):
    """Takes any number, as somebody's first kernel does."""

    n: int
    name = "unchecked"

    @property
    def params(self) -> tuple[Param, ...]:
        return (Param("x", "f32", ("n",), Access.IN),)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(1, 1, 1), block=(32, 1, 1))

    @classmethod
    def examples(cls) -> dict[str, Unchecked]:
        return {"three": cls(n=3)}


def test_arrays_have_elements() -> None:
    assert specialise(Unchecked, ["n=1"]).n == 1
    for n in (0, -4):
        with pytest.raises(SettingError, match=rf"n={n}: its x would be of shape \({n},\)"):
            specialise(Unchecked, [f"n={n}"])


@pytest.mark.parametrize("kernel", kernels().values(), ids=kernels())
def test_every_kernel_describes_itself(kernel: type[KernelSpec]) -> None:
    assert len(purpose_of(kernel)) > 10
    assert "\n" not in purpose_of(kernel)
    first = smallest_example(kernel)
    names = {info.name.partition(".")[0] for info in fields_of(kernel)}
    assert names == set(field_values(first))
    settings = [f"{i.name}={i.example}" for i in fields_of(kernel) if i.example is not None]
    assert specialise(kernel, settings) == first  # what it shows, it takes
    assert plain(FORMATS["Q6_K"]) == "Q6_K"


@pytest.mark.parametrize("name", ["gemv", "gemv_f32", "gemm", "gemm_small", "repack"])
def test_any_format_that_a_kernel_reads_goes_with_an_example(name: str) -> None:
    """Blocks of 256 columns, too, where the first example has fewer."""
    for format_name in ("Q4_K", "Q6_K", "Q8_0"):
        made = specialise(kernel(name), [f"format={format_name}"])
        assert plain(made.format) == format_name
    with pytest.raises(SettingError, match="256"):
        specialise(kernel(name), ["format=Q4_K", "cols=32"])


def _flat(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields and their values, of records part by part; lists are not set by text."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(plain(value), dict):
            yield from _flat(value, f"{prefix}{field.name}.")
        elif not isinstance(value, tuple):
            yield prefix + field.name, plain(value)


def test_some_example_takes_any_value_that_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that can have it: by a value of each field of each kernel's examples."""
    tried = set()
    for kind in kernels().values():
        examples = kind.examples()
        monkeypatch.setattr(kind, "examples", lambda found=examples: found)  # made once
        for example in examples.values():
            for name, value in _flat(example):
                key = (kind.name, name, value if name == "format" else type(value))
                if key in tried:
                    continue
                tried.add(key)
                made = specialise(kind, [f"{name}={value}"])
                assert dict(_flat(made)).get(name) == value, key
    assert len(tried) > 600
