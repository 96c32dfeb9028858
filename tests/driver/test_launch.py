"""Launches: arguments by name, packing, limits, the call itself."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import LaunchError, LifetimeError
from urdir.driver.kernel import param_layout
from urdir.driver.launch import launch, pack
from urdir.driver.limits import check_limits
from urdir.ptxgen.spec import Access, LaunchShape, Param

N = 1000
Make = Callable[..., Any]


@pytest.fixture
def args(device: Device) -> dict[str, Any]:
    x, y = device.allocate(4 * N, "x"), device.allocate(4 * N, "y")
    x.fill(0)
    return {"x": x, "n": N, "y": y, "scale": 0.5}


def test_launch_computes(device: Device, make_kernel: Make, args: dict[str, Any]) -> None:
    kernel = make_kernel()
    x = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    args["x"].upload(x)
    with device.create_stream() as stream:
        packed = pack(kernel, args)
        for _ in range(3):
            launch(device.load(kernel), packed, stream)
        y = args["y"].download("f4")
    np.testing.assert_allclose(y, kernel.reference(x=x, scale=0.5)["y"], rtol=1e-6, atol=1e-4)


def test_packed_block_is_the_ptx_layout(make_kernel: Make, args: dict[str, Any]) -> None:
    kernel = make_kernel()
    assert param_layout(kernel) == ((0, 8), (8, 4), (16, 8), (24, 4))
    packed = pack(kernel, args)
    x, y = args["x"].address, args["y"].address
    assert packed.data == struct.pack("<QIxxxxQf", x, N, y, 0.5)
    assert packed.regions == {"x": args["x"], "y": args["y"]}


def test_small_scalars_are_packed_closely(make_kernel: Make) -> None:
    types = ("u8", "u16", "f16", "s32", "s64", "f64", "bf16")
    values = (7, 65535, 1.5, -5, -(2**63), np.pi, 0x3F80)
    kernel = make_kernel(params=tuple(Param(f"p{i}", t) for i, t in enumerate(types)))
    packed = pack(kernel, {f"p{i}": v for i, v in enumerate(values)})
    assert packed.data == struct.pack("<BxHexxixxxxqdH", *values)


def test_launch_without_parameters(device: Device, make_kernel: Make) -> None:
    text = ".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry nop() { ret; }\n"
    kernel = make_kernel(text=text, name="nop", params=(), spec_key="nop")
    with device.create_stream() as stream:
        launch(device.load(kernel), pack(kernel, {}), stream)
        stream.synchronize()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, r"^attn: kernel ramp, argument 'x': a buffer or slice is needed, not null"),
        ({"x": 0}, "not null"),
        ({"x": 0x7F0000000000}, "argument 'x': a buffer or slice is needed, not int"),
        ({"x": np.zeros(N, np.float32)}, "needed, not ndarray"),
        ({"n": 3.0}, r"argument 'n': 3\.0 is not a valid u32"),
        ({"n": -1}, "argument 'n': -1 is not a valid u32"),
        ({"n": 2**32}, "argument 'n': 4294967296 is not a valid u32"),
        ({"n": None}, "argument 'n': None is not a valid u32"),
        ({"scale": "1"}, "argument 'scale': '1' is not a valid f32"),
        ({"scale": 1e39}, r"argument 'scale': 1e\+39 is not a valid f32"),
        ({"m": 1}, r"kernel ramp takes \(x, n, y, scale\): unexpected m$"),
    ],
)
def test_bad_arguments(
    make_kernel: Make, args: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        pack(make_kernel(), {**args, **change}, "attn")


def test_bad_buffers(device: Device, make_kernel: Make, args: dict[str, Any]) -> None:
    kernel = make_kernel()
    big = device.allocate(5 * N, "big")
    gone = device.allocate(4 * N, "gone")
    gone.close()
    cases = [
        (big.slice(0, 4 * N - 1, "short"), r"f32 \(1000,\) needs 4,000 bytes, 'short' has 3,999"),
        (big.slice(8, 4 * N, "odd"), "'odd' at 0x.*8 is not 16-byte aligned"),
        (gone, "'gone' is closed"),
    ]
    for value, message in cases:
        with pytest.raises(LaunchError, match=message):
            pack(kernel, {**args, "x": value})
    with pytest.raises(LaunchError, match=r"'n': a number .* is needed, not <Buffer 'big'"):
        pack(kernel, {**args, "n": big})
    with pytest.raises(LaunchError, match="missing y, scale; unexpected z"):
        pack(kernel, {"x": big, "n": 1, "z": 1})


@pytest.mark.parametrize("value", [True, np.int64(5), np.uint8(5)])
def test_integer_likes_are_taken(make_kernel: Make, args: dict[str, Any], value: Any) -> None:
    assert pack(make_kernel(), {**args, "n": value}).data[8:12] == int(value).to_bytes(4, "little")


@pytest.mark.parametrize("value", [np.float32(0.1), float("inf"), 3])
def test_float_likes_are_taken(make_kernel: Make, args: dict[str, Any], value: Any) -> None:
    data = pack(make_kernel(), {**args, "scale": value}).data
    assert data[24:28] == np.float32(value).tobytes()


def test_buffer_closed_after_packing(
    device: Device, make_kernel: Make, args: dict[str, Any]
) -> None:
    kernel = make_kernel()
    loaded, packed = device.load(kernel), pack(kernel, args)
    args["y"].close()
    stream = device.create_stream()
    with pytest.raises(LifetimeError, match="kernel ramp: buffer 'y' is closed"):
        launch(loaded, packed, stream)


def test_what_does_not_belong_together(
    device: Device, make_kernel: Make, args: dict[str, Any]
) -> None:
    kernel, other = make_kernel(), make_kernel(spec_key="other")
    packed = pack(kernel, args)
    stream = device.create_stream("ours")
    with pytest.raises(LaunchError, match=r"packed for kernel ramp-1-sm_\w+ cannot launch other-"):
        launch(device.load(other), packed, stream)
    launch(device.load(make_kernel()), packed, stream)
    with Device.open("emulator:sm_80") as second:
        with pytest.raises(LaunchError, match="'x' belongs to another device"):
            launch(second.load(kernel), packed, stream)
        with pytest.raises(LaunchError, match="stream 'theirs' belongs to another device"):
            launch(device.load(kernel), packed, second.create_stream("theirs"))
    stream.synchronize()
    loaded = device.load(kernel)
    loaded.close()
    with pytest.raises(LifetimeError, match="kernel 'ramp' was used after"):
        launch(loaded, packed, stream)


def test_arguments_are_copied_at_the_call(
    device: Device, make_kernel: Make, args: dict[str, Any]
) -> None:
    kernel = make_kernel()
    loaded = device.load(kernel)
    with device.create_stream() as stream:
        launch(loaded, pack(kernel, args), stream)  # the packed arguments end here
        launch(loaded, pack(kernel, {**args, "n": 0, "scale": 9.0}), stream)
        assert np.array_equal(args["y"].download("f4"), np.arange(N, dtype=np.float32))


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"grid": (0, 1, 1)}, [r"grid\.x is 0, the limit is 2,147,483,647"]),
        ({"grid": (1, 65536, 1)}, [r"grid\.y is 65,536, the limit is 65,535"]),
        ({"block": (1025, 1, 1)}, [r"block\.x is 1,025, the limit is 1,024", "threads of a block"]),
        ({"block": (1, 1, 65)}, [r"block\.z is 65, the limit is 64"]),
        ({"block": (64, 32, 1)}, ["threads of a block is 2,048, the limit is 1,024"]),
        ({"shared_bytes": 1 << 20}, ["shared_bytes is 1,048,576, the limit is "]),
        ({"cluster": (16, 1, 1), "grid": (16, 1, 1)}, [r"cluster\.x is 16, the limit is 8"]),
        (
            {"cluster": (2, 1, 1), "grid": (3, 1, 1)},
            [r"grid\.x is 3, not a multiple of the cluster"],
        ),
        ({"grid": (1.0, 1, 1)}, [r"grid\.x is 1\.0, a float"]),
    ],
)
def test_limits_are_checked_before_loading(
    emulator: Device, make_kernel: Make, fields: dict[str, Any], messages: list[str]
) -> None:
    shape = dataclasses.replace(LaunchShape((1, 1, 1), (32, 1, 1)), **fields)
    kernel = make_kernel(launch_shape=shape)
    for message in messages:
        with pytest.raises(LaunchError, match=message) as caught:
            emulator.load(kernel)
    assert "kernel ramp" in str(caught.value)
    assert kernel.rendered == ([],)


def test_clusters_need_a_device_with_clusters(make_kernel: Make) -> None:
    kernel = make_kernel(launch_shape=LaunchShape((2, 1, 1), (32, 1, 1), cluster=(2, 1, 1)))
    with Device.open("emulator:sm_80") as device, pytest.raises(LaunchError, match=r"limit is 1;"):
        check_limits(kernel, device.properties)


def test_cooperative_launch(device: Device, make_kernel: Make, args: dict[str, Any]) -> None:
    shape = LaunchShape((-(-N // 512), 1, 1), (512, 1, 1), cooperative=True)
    kernel = make_kernel(launch_shape=shape, spec_key="cooperative")
    with device.create_stream() as stream:
        launch(device.load(kernel), pack(kernel, args), stream)
        assert np.array_equal(args["y"].download("f4"), np.arange(N, dtype=np.float32))


def test_cooperative_grid_must_fit(device: Device, make_kernel: Make) -> None:
    shape = LaunchShape((100_000, 1, 1), (1024, 1, 1), cooperative=True)
    kernel = make_kernel(launch_shape=shape, spec_key="too many")
    with pytest.raises(LaunchError, match=r"cooperative grid of 100000 CTAs, .* fit on the device"):
        device.load(kernel)


def test_large_dynamic_shared_memory_is_allowed(
    device: Device, make_kernel: Make, args: dict[str, Any]
) -> None:
    """96 KB of it, written and read by every thread."""
    text = SHARED
    kernel = make_kernel(
        text=text,
        name="reverse",
        params=(Param("y", "f32", (N,), Access.OUT),),
        launch_shape=LaunchShape((1, 1, 1), (N, 1, 1), shared_bytes=96 * 1024),
        spec_key="reverse",
    )
    with device.create_stream() as stream:
        launch(device.load(kernel), pack(kernel, {"y": args["y"]}), stream)
        y = args["y"].download("f4")
    assert np.array_equal(y, np.arange(N, dtype=np.float32)[::-1])


def test_config_is_made_once_per_stream(
    device: Device, make_kernel: Make, args: dict[str, Any]
) -> None:
    kernel = make_kernel()
    loaded, packed = device.load(kernel), pack(kernel, args)
    a, b = device.create_stream("a"), device.create_stream("b")
    first = packed.bind(loaded, a)
    assert packed.bind(loaded, a) is first
    assert int(first.hStream) == int(a.handle)
    assert int(packed.bind(loaded, b).hStream) == int(b.handle)


# y[i] = N - 1 - i, through the far end of dynamic shared memory
SHARED = f"""\
.version 6.3
.target sm_75
.address_size 64
.extern .shared .align 16 .b8 scratch[];
.visible .entry reverse(.param .u64 y)
{{
    .reg .b32 %i, %j, %base, %at;
    .reg .b64 %y, %offset;
    .reg .f32 %value;
    ld.param.u64 %y, [y];
    mov.u32 %i, %tid.x;
    mov.u32 %base, scratch;
    add.u32 %base, %base, {96 * 1024 - 4 * N};
    shl.b32 %at, %i, 2;
    add.u32 %at, %at, %base;
    cvt.rn.f32.u32 %value, %i;
    st.shared.f32 [%at], %value;
    bar.sync 0;
    sub.u32 %j, {N - 1}, %i;
    shl.b32 %at, %j, 2;
    add.u32 %at, %at, %base;
    ld.shared.f32 %value, [%at];
    mul.wide.u32 %offset, %i, 4;
    add.u64 %y, %y, %offset;
    st.global.f32 [%y], %value;
    ret;
}}
"""
