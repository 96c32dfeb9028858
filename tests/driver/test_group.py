"""Several devices: peer access, copies, kernels that wait for each other, faults, races.

(tests/model/engine/test_failing_rank.py has faults of GPUs.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from urdir.driver.bindings import emulated
from urdir.driver.device import Device
from urdir.driver.device_name import DeviceName
from urdir.driver.errors import (
    CudaError,
    DeviceNameError,
    DriverError,
    GroupError,
    LaunchError,
    TransferError,
)
from urdir.driver.execute import record, run
from urdir.driver.group import Group, launch_together
from urdir.driver.kernel import Kernel
from urdir.driver.memory import Buffer
from urdir.driver.plan import Plan
from urdir.ptxgen.spec import Access, LaunchShape, Param

MakeKernel = Callable[..., Kernel]

_FRAME = """\
.version 6.3
.target sm_75
.address_size 64
.visible .entry {name}(
    .param .u64 mine,
    .param .u64 theirs
)
{{
    .reg .pred %p;
    .reg .b32 %a, %b;
    .reg .b64 %mine, %theirs;
    ld.param.u64 %mine, [mine];
    ld.param.u64 %theirs, [theirs];
{body}
    ret;
}}
"""


def one_thread(
    make_kernel: MakeKernel, name: str, body: str, mine: Access, theirs: Access
) -> Kernel:
    """A kernel of one thread with a word of its own (16 bytes) and a peer's."""
    params = (Param("mine", "u32", (4,), mine), Param("theirs", "u32", (4,), theirs))
    return make_kernel(
        name=name,
        spec_key=name,
        params=params,
        text=_FRAME.format(name=name, body=body),
        launch_shape=LaunchShape((1, 1, 1), (1, 1, 1)),
    )


@pytest.fixture
def group() -> Iterator[Group]:
    with Group.open("emulator", 2) as opened:
        yield opened


@pytest.fixture
def any_group(device_name: str, needs_gpus: Callable[[int], None]) -> Iterator[Group]:
    """Of GPUs, too: for what ends none."""
    needs_gpus(2)
    with Group.open(device_name, 2) as opened:
        yield opened


def words(device: Device, name: str, *values: int) -> Buffer:
    buffer = device.allocate(16, name)
    buffer.upload(np.array([*values, 0, 0, 0, 0][:4], np.uint32))
    return buffer


def test_devices_of_a_group_are_ranks_with_addresses_of_their_own(group: Group) -> None:
    assert [device.name for device in group] == ["emulator:sm_90a", "emulator:sm_90a/1"]
    a, b = (device.allocate(64, "x") for device in group)
    assert a.address != b.address
    assert group[1].memory_info() == group[0].memory_info()
    a.upload(np.arange(16, dtype=np.uint32))
    b.fill(7)
    assert a.download(np.uint32).tolist() == list(range(16))
    assert set(b.download(np.uint8).tolist()) == {7}


def test_ordinals_may_be_chosen(group: Group) -> None:
    with Group.open("emulator:sm_80", (2, 0)) as other:
        assert [device.name for device in other] == ["emulator:sm_80/2", "emulator:sm_80"]


@pytest.mark.parametrize("gpus", [0, (), (1, 1), (-1, 0)])
def test_gpus_that_are_none_are_refused(gpus: Any) -> None:
    with pytest.raises(DeviceNameError, match="number of GPUs"):
        Group.open("emulator", gpus)


def test_one_gpu_by_name_is_no_group() -> None:
    with pytest.raises(DeviceNameError, match="cuda:1"):
        Group.open("cuda:1", 2)


def test_devices_that_cannot_reach_each_other_are_refused() -> None:
    api = emulated(device_count=2)
    api.cuDeviceCanAccessPeer = lambda dev, peer: (api.CUresult.CUDA_SUCCESS, 0)
    with pytest.raises(DriverError, match="cannot reach the memory of emulator:sm_90a/1"):
        Group.open("emulator", 2, api=api)
    assert api.live() == {}


def test_two_groups_may_have_the_same_devices(device_name: str, needs_gpus: Any) -> None:
    needs_gpus(2)
    api = emulated(device_count=2) if device_name.startswith("emulator") else None
    values = np.arange(16, dtype=np.uint32)
    with Group.open(device_name, 2, api=api) as first:
        for _ in range(2):
            with Group.open(device_name, 2, api=api) as second:
                source, target = second[0].allocate(64, "source"), second[1].allocate(64, "target")
                source.upload(values)
                target.copy_from(source)
                assert (target.download(np.uint32) == values).all()
        target = first[1].allocate(64, "target")
        target.copy_from(words(first[0], "source", 1, 2, 3, 4).slice(0, 16))
        assert target.download(np.uint32)[:4].tolist() == [1, 2, 3, 4]


@pytest.mark.sanitizer
@pytest.mark.parametrize("queued", [True, False])
def test_bytes_are_copied_from_device_to_device(any_group: Group, queued: bool) -> None:
    group = any_group
    values = np.random.default_rng(1).integers(0, 255, 1000, np.uint8)
    source, target = group[0].allocate(1000, "source"), group[1].allocate(1000, "target")
    source.upload(values)
    group.synchronize()  # the bytes may be on their way
    with group[1].create_stream() as stream:
        target.copy_from(source, stream if queued else None)
        assert (target.download(np.uint8) == values).all()


def test_a_copy_between_devices_of_no_group_is_refused() -> None:
    with Device.open("emulator") as first, Device.open("emulator") as second:
        source, target = first.allocate(16, "source"), second.allocate(16, "target")
        with pytest.raises(TransferError, match="not of one group"):
            target.copy_from(source)


@pytest.mark.parametrize("name", ["cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess"])
@pytest.mark.parametrize("nth", [1, 2])
def test_peer_access_that_fails_leaves_nothing_open(name: str, nth: int) -> None:
    api = emulated(device_count=2)
    api.inject(name, nth)
    with pytest.raises(CudaError, match=f"{name} of emulator:sm_90a.* to emulator:sm_90a"):
        Group.open("emulator", 2, api=api)
    assert api.live() == {}


@pytest.mark.parametrize("queued", [True, False])
def test_a_copy_between_devices_that_fails_is_named(group: Group, queued: bool) -> None:
    source, target = (device.allocate(16, "buffer") for device in group)
    group[0].api.inject("cuMemcpyPeerAsync" if queued else "cuMemcpyPeer")
    with group[1].create_stream() as stream, pytest.raises(CudaError, match="cuMemcpyPeer 16"):
        target.copy_from(source, stream if queued else None)


_READ = "    ld.global.u32 %a, [%theirs];\n    st.global.u32 [%mine], %a;"


@pytest.mark.sanitizer
def test_a_kernel_reads_a_peers_memory(any_group: Group, make_kernel: MakeKernel) -> None:
    group = any_group
    kernel = one_thread(make_kernel, "read", _READ, Access.OUT, Access.IN)
    mine, theirs = words(group[0], "mine"), words(group[1], "theirs", 41)
    plan = Plan("read")
    plan.launch(kernel, "read", mine=mine, theirs=theirs)
    with group[0].create_stream() as stream:
        run(plan, group[0], stream)
        assert mine.download(np.uint32)[0] == 41


def test_memory_of_a_device_of_no_group_is_refused(make_kernel: MakeKernel) -> None:
    kernel = one_thread(make_kernel, "read", _READ, Access.OUT, Access.IN)
    with Device.open("emulator") as first, Device.open("emulator") as second:
        plan = Plan("read")
        plan.launch(kernel, "read", mine=words(first, "mine"), theirs=words(second, "theirs"))
        with first.create_stream() as stream, pytest.raises(LaunchError, match="another device"):
            run(plan, first, stream)


def test_a_peers_memory_without_access_is_a_fault(make_kernel: MakeKernel) -> None:
    # the address as a number: nothing above the driver can see whose it is
    params = (Param("mine", "u32", (4,), Access.OUT), Param("theirs", "u64"))
    shape = LaunchShape((1, 1, 1), (1, 1, 1))
    text = _FRAME.format(name="read", body=_READ)
    kernel = make_kernel(name="read", params=params, text=text, launch_shape=shape)
    api = emulated(device_count=2)
    api.cuInit(0)
    names = [DeviceName("emulator", index, "sm_90a") for index in range(2)]
    with Device(api, names[0]) as first, Device(api, names[1]) as second:
        theirs = words(second, "theirs", 5)
        plan = Plan("read")
        plan.launch(kernel, "read", mine=words(first, "mine"), theirs=theirs.address)
        with first.create_stream() as stream:
            run(plan, first, stream)
            with pytest.raises(CudaError, match="of device 1, without peer access to it") as caught:
                stream.synchronize()
        assert caught.value.name == "CUDA_ERROR_ILLEGAL_ADDRESS"
        assert theirs.download(np.uint32)[0] == 5  # the other context lives on


#: Count to 20 together: write one more than the peer's last, wait for the peer's answer.
_COUNT = """\
    mov.u32 %b, 0;
NEXT:
    add.u32 %b, %b, 1;
    st.release.sys.global.u32 [%theirs], %b;
POLL:
    ld.acquire.sys.global.u32 %a, [%mine];
    setp.lt.u32 %p, %a, %b;
    @%p bra POLL;
    setp.lt.u32 %p, %b, 20;
    @%p bra NEXT;"""


def counting(make_kernel: MakeKernel, group: Group) -> tuple[list[Plan], list[Buffer]]:
    kernel = one_thread(make_kernel, "count", _COUNT, Access.INOUT, Access.INOUT)
    flags = [words(device, f"flag {rank}") for rank, device in enumerate(group)]
    plans = [Plan(f"rank {rank}") for rank in range(len(group))]
    for rank, plan in enumerate(plans):
        plan.launch(kernel, "count", mine=flags[rank], theirs=flags[1 - rank])
    return plans, flags


def test_kernels_of_two_devices_wait_for_each_other(
    any_group: Group, make_kernel: MakeKernel
) -> None:
    group = any_group
    plans, flags = counting(make_kernel, group)
    streams = [device.create_stream() for device in group]
    graphs = [record(plan, device) for plan, device in zip(plans, group, strict=True)]
    launch_together([*zip(graphs, streams, strict=True)])
    streams[0].synchronize()
    group.synchronize()
    assert [flag.download(np.uint32)[0] for flag in flags] == [20, 20]


def test_a_rank_that_never_comes_ends_all(group: Group, make_kernel: MakeKernel) -> None:
    plans, flags = counting(make_kernel, group)
    stream = group[0].create_stream()
    run(plans[0], group[0], stream)
    with pytest.raises(CudaError, match="deadlock: kernel count") as caught:
        stream.synchronize()
    text = str(caught.value)
    assert "rank 0, emulator:sm_90a: CUDA_ERROR_LAUNCH_TIMEOUT" in text
    assert "rank 1, emulator:sm_90a/1: no fault of its own" in text
    with pytest.raises(GroupError, match=r"a device has failed.*CUDA_ERROR_LAUNCH_TIMEOUT"):
        flags[1].download(np.uint32)


def test_a_step_that_one_rank_is_refused_ends_all(group: Group, make_kernel: MakeKernel) -> None:
    plans, flags = counting(make_kernel, group)
    streams = [device.create_stream() for device in group]
    graphs = [record(plan, device) for plan, device in zip(plans, group, strict=True)]
    group[0].api.inject("cuGraphLaunch", 1)  # nobody waits yet
    with pytest.raises(CudaError, match="cuGraphLaunch 'rank 0'"):
        launch_together([*zip(graphs, streams, strict=True)])
    group[0].api.inject("cuGraphLaunch", 2)
    with pytest.raises(GroupError, match=r"rank 1 was refused a step.*'rank 1'") as caught:
        launch_together([*zip(graphs, streams, strict=True)])
    assert "rank 0, emulator:sm_90a: CUDA_ERROR_LAUNCH_TIMEOUT" in str(caught.value)
    with pytest.raises(GroupError, match="close the group"):
        flags[0].download(np.uint32)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_on_one_rank_is_told_on_whichever_is_waited_for(
    group: Group, make_kernel: MakeKernel, rank: int
) -> None:
    plans, _ = counting(make_kernel, group)
    streams = [device.create_stream() for device in group]
    graphs = [record(plan, device) for plan, device in zip(plans, group, strict=True)]
    group[0].api.inject("launch", 1)  # of the kernel that runs first
    launch_together([*zip(graphs, streams, strict=True)])
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        streams[rank].synchronize()
    for device in group:
        with pytest.raises(GroupError, match="close the group"):
            device.synchronize()


def test_notes_are_part_of_the_message(group: Group, make_kernel: MakeKernel) -> None:
    group.notes.append(lambda: "a note of the kernel")
    group[0].api.inject("launch")
    plans, _ = counting(make_kernel, group)
    stream = group[0].create_stream()
    run(plans[0], group[0], stream)
    with pytest.raises(CudaError, match="a note of the kernel"):
        stream.synchronize()


# ---- the sanitizer between devices ----

_WRITE = "    mov.u32 %a, 6;\n    st.global.u32 [%theirs], %a;"
#: Data, then a flag behind it; and the other side.
_SEND = _WRITE + "\n    st.release.sys.global.u32 [%theirs+4], %a;"
_RECEIVE = """\
POLL:
    ld.acquire.sys.global.u32 %a, [%mine+4];
    setp.ne.u32 %p, %a, 6;
    @%p bra POLL;
    ld.global.u32 %b, [%mine];
    st.global.u32 [%mine+8], %b;"""
#: The same without an acquire.
_LOOK = _RECEIVE.replace("acquire", "relaxed")
_FENCED = _LOOK.replace("    ld.global.u32 %b", "    fence.acq_rel.sys;\n    ld.global.u32 %b")


@pytest.fixture
def watched() -> Iterator[Group]:
    api = emulated(device_count=2, sanitize=True)
    with Group.open("emulator", 2, api=api) as opened:
        yield opened


@pytest.mark.parametrize("receive", [_RECEIVE, _FENCED, _LOOK])
def test_what_a_peer_wrote_is_read_after_an_acquire(
    watched: Group, make_kernel: MakeKernel, receive: str
) -> None:
    mine = words(watched[0], "mine")
    other = words(watched[1], "other")
    plans = [Plan("receive"), Plan("send")]
    receiver = one_thread(make_kernel, "receive", receive, Access.INOUT, Access.IN)
    sender = one_thread(make_kernel, "send", _SEND, Access.IN, Access.INOUT)
    plans[0].launch(receiver, "receive", mine=mine, theirs=other)
    plans[1].launch(sender, "send", mine=other, theirs=mine)
    streams = [device.create_stream() for device in watched]
    for plan, device, stream in zip(plans, watched, streams, strict=True):
        run(plan, device, stream)
    if receive is _LOOK:
        with pytest.raises(CudaError, match=r"race: .* of device 0 and .* of device 1 touch"):
            streams[0].synchronize()
    else:
        streams[0].synchronize()
        assert mine.download(np.uint32)[2] == 6


@pytest.mark.parametrize("order", ["event", "host", "nothing"])
def test_work_of_another_device_comes_after_an_event_or_the_host(
    watched: Group, make_kernel: MakeKernel, order: str
) -> None:
    mine, other = words(watched[0], "mine"), words(watched[1], "other")
    write, read = Plan("write"), Plan("read")
    writer = one_thread(make_kernel, "write", _WRITE, Access.IN, Access.INOUT)
    reader = one_thread(make_kernel, "read", _READ, Access.OUT, Access.IN)
    write.launch(writer, "write", mine=other, theirs=mine)
    read.launch(reader, "read", mine=words(watched[0], "result"), theirs=mine)
    first, second = watched[1].create_stream(), watched[0].create_stream()
    run(write, watched[1], first)
    if order == "event":
        second.wait(first.record())
    elif order == "host":
        first.synchronize()
    run(read, watched[0], second)
    if order == "nothing":
        with pytest.raises(CudaError, match="race"):
            watched.synchronize()
    else:
        second.synchronize()
