"""What a process for strangers' text takes from itself before the first of it comes.

It needs no files, no processes and no network: it reads requests and writes replies through pipes
that are open already. Loaded by sandbox_main.py by its path, so it imports nothing of urdir.

Every measure is of use without the others, and each is left out where the system lacks it.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import struct
import sys

MEMORY_LIMIT = 512 << 20  # bytes of address space

_SET_SECCOMP, _SECCOMP_FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38  # linux/prctl.h, linux/seccomp.h
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with EPERM
# linux/bpf_common.h: load a word; jump if equal; return
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_SYSCALL_AT, _ARCHITECTURE_AT = 0, 4  # in struct seccomp_data

#: What Python calls while it works: memory, pipes that are open, time, threads' locks, its end.
#: x86-64's and arm64's numbers (asm/unistd_64.h, asm-generic/unistd.h); None: not there.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
#: Machine -> AUDIT_ARCH_* (linux/audit.h), column of the table.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def confine(memory: int = MEMORY_LIMIT) -> None:
    """Take them, and all but ``memory`` bytes of address space. Whatever Python imports later on
    must have been imported before.
    """
    _go_first()
    _limit_resources(memory)
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0:
            _allow_calls(libc)


def _go_first() -> None:
    """Where memory is short, Linux ends this process before others."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _limit_resources(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {"RLIMIT_AS": memory, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 0}
    limits["RLIMIT_NPROC"] = 0  # counts the user's processes: this one can start none
    for name, most in limits.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            kind = getattr(resource, name)
            _, hard = resource.getrlimit(kind)
            if hard != resource.RLIM_INFINITY:
                most = min(most, hard)
            resource.setrlimit(kind, (most, most))


def _allow_calls(libc: ctypes.CDLL) -> None:
    """Install a filter of system calls; all but those of the table fail with EPERM."""
    if platform.machine() not in _MACHINES or sys.maxsize < 1 << 32:
        return
    architecture, column = _MACHINES[platform.machine()]
    numbers = [row[column] for row in _CALLS.values()]
    allowed = [number for number in numbers if number is not None]

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    end = len(allowed)  # where the filter refuses, counted from behind the first comparison
    program = [
        instruction(_LOAD, _ARCHITECTURE_AT),
        instruction(_JUMP_EQUAL, architecture, 0, end + 1),
        instruction(_LOAD, _SYSCALL_AT),
        *(instruction(_JUMP_EQUAL, number, end - place) for place, number in enumerate(allowed)),
        instruction(_RETURN, _REFUSE),
        instruction(_RETURN, _ALLOW),
    ]
    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(header, len(header))
    libc.prctl(_SET_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(pointer), 0, 0)
