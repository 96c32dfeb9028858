"""Restrictions that a process for untrusted text imposes on itself before it reads any.

It needs no files, processes or network: it reads requests and writes replies through pipes that are
already open. sandbox_main.py loads this file by path, so it imports nothing of urdir.

Each restriction is useful without the others, and is omitted if the system lacks it.
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

#: System calls that Python makes while running: memory, open pipes, time, locks of threads, exit.
#: Numbers of x86-64 and arm64 (asm/unistd_64.h, asm-generic/unistd.h); None: does not exist.
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
    """Apply the restrictions, and limit address space to ``memory`` bytes. Imports after this call
    fail.
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
    """Make this process Linux's first choice to kill when memory is short."""
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
    """Install a seccomp filter: system calls outside the table fail with EPERM."""
    if platform.machine() not in _MACHINES or sys.maxsize < 1 << 32:
        return
    architecture, column = _MACHINES[platform.machine()]
    numbers = [row[column] for row in _CALLS.values()]
    allowed = [number for number in numbers if number is not None]

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    # jump target for refusal, relative to the instruction after the first comparison
    end = len(allowed)
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
