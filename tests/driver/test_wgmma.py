"""wgmma's matrix descriptors: where the emulator, and a Hopper GPU, find the values of a matrix.

Values are small integers, so that every product and sum is exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.spec import Access, LaunchShape, Param

#: Bytes of shared memory for A and B each.
TILE = 64 << 10
MODES = {16: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Layout:
    """How a matrix (extent, 16) of 2-byte values lies in shared memory.

    ``width`` is that of the swizzle's pattern in bytes (16: none); ``start`` counts from the tile,
    which is aligned to 1024 bytes; the pattern begins 128 times ``base`` bytes after such a place.
    """

    width: int
    is_transposed: bool
    leading: int
    stride: int
    start: int = 0
    base: int = 0

    def address(self, mn: Any, k: Any) -> Any:
        """Of value (mn, k) in the tile: the canonical layouts of PTX ISA 9.7.15.5.1, of 8 rows."""
        if self.is_transposed and self.width == 16:
            at = mn % 8 * 2 + mn // 8 * self.stride + k % 8 * 16 + k // 8 * self.leading
        elif self.is_transposed:
            wide = self.width // 2
            at = mn % wide * 2 + mn // wide * self.leading
            at += k % 8 * self.width + k // 8 * self.stride
        else:
            at = mn % 8 * self.width + mn // 8 * self.stride + k % 8 * 2
            at += k // 8 * (self.leading if self.width == 16 else 16)
        at = at + self.start
        pattern = at - 128 * self.base
        return at ^ ((pattern >> 7 & (self.width // 16 - 1)) << 4)

    def tile(self, matrix: Any, rng: np.random.Generator) -> Any:
        """The tile of a matrix (extent, 16); other places hold noise."""
        tile = rng.integers(0, 0x3C00, TILE // 2).astype("u2")
        mn, k = np.indices(matrix.shape)
        at = self.address(mn, k) // 2
        assert np.unique(at).size == matrix.size, "places overlap"
        assert at.max() < tile.size
        tile[at] = matrix.view("u2")
        return tile

    @property
    def descriptor(self) -> int:
        """Without the address of the tile (PTX ISA 9.7.15.5.1.2)."""
        low = self.start >> 4 | self.leading >> 4 << 16
        return low | self.stride >> 4 << 32 | self.base << 49 | MODES[self.width] << 62


HEAD = f"""\
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 tile[];
.visible .entry product(.param .u64 a, .param .u64 b, .param .u64 out, .param .u64 a_at,
    .param .u64 b_at)
{{
    .reg .b32 %i, %s, %t, %v, %a<4>, %d<128>;
    .reg .b64 %a, %b, %out, %desc_a, %desc_b, %low;
    .reg .pred %more, %adds;
    mov.u32 %i, %tid.x;
    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u64 %out, [out];
    ld.param.u64 %desc_a, [a_at];
    ld.param.u64 %desc_b, [b_at];
    mov.u32 %s, tile;
    shr.u32 %t, %s, 4;
    cvt.u64.u32 %low, %t;
    add.u64 %desc_a, %desc_a, %low;
    add.u64 %desc_b, %desc_b, %low;
    add.u64 %desc_b, %desc_b, {TILE >> 4};
    mul.wide.u32 %low, %i, 4;
    add.u64 %a, %a, %low;
    add.u64 %b, %b, %low;
    shl.b32 %t, %i, 2;
    add.u32 %s, %s, %t;
FILL:
    ld.global.u32 %v, [%a];
    st.shared.u32 [%s], %v;
    ld.global.u32 %v, [%b];
    st.shared.u32 [%s+{TILE}], %v;
    add.u64 %a, %a, 512;
    add.u64 %b, %b, 512;
    add.u32 %s, %s, 512;
    add.u32 %t, %t, 512;
    setp.lt.u32 %more, %t, {TILE};
    @%more bra FILL;
    fence.proxy.async;
    bar.sync 0;
"""


def kernel(make_kernel: Callable[..., Any], n: int, kinds: str, operands: str) -> Any:
    """out = A B with both in shared memory; ``operands`` are the instruction's last ones."""
    packed = 2 if kinds.startswith("f16") else 1
    count = n // 2 // packed
    registers = ", ".join(f"%d{i}" for i in range(count))
    text = HEAD + (
        "    setp.ne.u32 %adds, %i, %i;\n    wgmma.fence.sync.aligned;\n"
        f"    wgmma.mma_async.sync.aligned.m64n{n}k16.{kinds} {{{registers}}}, %desc_a, %desc_b,"
        f" {operands};\n    wgmma.commit_group.sync.aligned;\n"
        "    wgmma.wait_group.sync.aligned 0;\n"
        f"    mad.wide.u32 %out, %i, {4 * count}, %out;\n"
        + "".join(f"    st.global.b32 [%out+{4 * i}], %d{i};\n" for i in range(count))
        + "    ret;\n}\n"
    )
    kind = "f16" if packed == 2 else "f32"
    params = (
        Param("a", "f16", (TILE // 2,), Access.IN), Param("b", "f16", (TILE // 2,), Access.IN),
        Param("out", kind, (128, count * packed), Access.OUT),
        Param("a_at", "u64"), Param("b_at", "u64"),
    )  # fmt: skip
    return make_kernel(
        text=text, name="product", params=params, spec_key=f"wgmma-{zlib.crc32(text.encode()):x}",
        launch_shape=LaunchShape((1, 1, 1), (128, 1, 1), (1, 1, 1), 2 * TILE),
    )  # fmt: skip


def matrix(out: Any) -> Any:
    """(128, n / 2) of D's values, as lanes hold them, to (64, n) (PTX ISA 9.7.15.5.2, D)."""
    lane, i = np.indices(out.shape)
    warp, group, thread = lane // 32, lane % 32 // 4, lane % 4
    result = np.zeros((64, 2 * out.shape[1]), out.dtype)
    result[16 * warp + group + 8 * (i // 2 % 2), 2 * thread + i % 2 + 8 * (i // 4)] = out
    return result


def small(rng: np.random.Generator, *shape: int) -> Any:
    return rng.integers(-4, 5, shape).astype(np.float16)


def run(
    device: Device, make_kernel: Callable[..., Any], a: Any, b: Any, at: tuple[Layout, Layout],
    kinds: str = "f32.f16.f16", scales: str = "1, 1",
) -> Any:  # fmt: skip
    """The product of a (64, 16) and b (n, 16), transposed, each in its layout."""
    if device.native_target != "sm_90a":
        pytest.skip("wgmma is for sm_90a")
    transposed = ", ".join(str(int(layout.is_transposed)) for layout in at)
    made = kernel(make_kernel, b.shape[0], kinds, f"%adds, {scales}, {transposed}")
    rng = np.random.default_rng(5)
    tiles = [layout.tile(m, rng).view("f2") for layout, m in zip(at, (a, b), strict=True)]
    inputs = {"a": tiles[0], "b": tiles[1]}
    inputs |= {"a_at": at[0].descriptor, "b_at": at[1].descriptor}
    return matrix(run_kernel(device, made, inputs)["out"])


PLAIN = Layout(16, False, 128, 256)


@pytest.mark.parametrize(
    ("n", "layout"),
    [
        (8, PLAIN),
        (40, Layout(16, False, 16 * 40, 128)),  # as [K/8][N][8]
        (256, Layout(16, False, 8192, 144, start=48)),
        (40, Layout(32, False, 0, 256)),
        (24, Layout(32, False, 0, 512, start=2048)),
        (72, Layout(64, False, 0, 512)),
        (72, Layout(64, False, 0, 1024, start=32)),  # the second 16 values of K
        (256, Layout(128, False, 0, 1024)),
        (48, Layout(128, False, 0, 2048, start=96)),
        (8, Layout(16, True, 128, 256)),
        (64, Layout(16, True, 1024, 128, start=16)),
        (48, Layout(32, True, 1024, 256)),
        (96, Layout(64, True, 4096, 512)),
        (24, Layout(64, True, 0, 1024)),
        (128, Layout(128, True, 2048, 1024)),
        (200, Layout(128, True, 8192, 1024, start=2048)),
        # patterns that begin elsewhere
        (16, Layout(32, False, 0, 256, start=128, base=1)),
        (16, Layout(64, False, 0, 512, start=384, base=3)),
        (24, Layout(128, False, 0, 1024, start=640, base=5)),
        (64, Layout(128, True, 0, 1024, start=384, base=3)),
    ],
    ids=str,
)  # fmt: skip
def test_layouts(device: Device, make_kernel: Any, n: int, layout: Layout) -> None:
    rng = np.random.default_rng(n)
    a, b = small(rng, 64, 16), small(rng, n, 16)
    want = a.astype("f4") @ b.astype("f4").T
    np.testing.assert_array_equal(run(device, make_kernel, a, b, (PLAIN, layout)), want)
    if n == 64:
        other = run(device, make_kernel, b, a, (layout, Layout(128, False, 0, 1024)))
        np.testing.assert_array_equal(other, want.T)


@pytest.mark.parametrize(
    "layout", [Layout(64, False, 0, 512), Layout(128, True, 0, 1024), Layout(32, True, 512, 2048)],
    ids=str,
)  # fmt: skip
def test_layouts_of_a(device: Device, make_kernel: Any, layout: Layout) -> None:
    rng = np.random.default_rng(3)
    a, b = small(rng, 64, 16), small(rng, 16, 16)
    got = run(device, make_kernel, a, b, (layout, PLAIN))
    np.testing.assert_array_equal(got, a.astype("f4") @ b.astype("f4").T)


@pytest.mark.parametrize("scales", ["-1, 1", "1, -1", "-1, -1"])
def test_negated_operands(device: Device, make_kernel: Any, scales: str) -> None:
    rng = np.random.default_rng(3)
    a, b = small(rng, 64, 16), small(rng, 8, 16)
    sign = 1 if scales == "-1, -1" else -1
    got = run(device, make_kernel, a, b, (PLAIN, PLAIN), scales=scales)
    np.testing.assert_array_equal(got, sign * (a.astype("f4") @ b.astype("f4").T))


def test_other_types(device: Device, make_kernel: Any) -> None:
    """Sums in f16; values in bf16."""
    rng = np.random.default_rng(3)
    a, b = small(rng, 64, 16), small(rng, 24, 16)
    want = a.astype("f4") @ b.astype("f4").T
    got = run(device, make_kernel, a, b, (PLAIN, PLAIN), "f16.f16.f16")
    np.testing.assert_array_equal(got, want)
    a, b = ((m.astype("f4").view("u4") >> 16).astype("u2").view("f2") for m in (a, b))
    got = run(device, make_kernel, a, b, (PLAIN, PLAIN), "f32.bf16.bf16")
    np.testing.assert_array_equal(got, want)
