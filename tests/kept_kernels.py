"""Kernels that a process of tests renders and compiles once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from urdir.driver.emulator import jit
from urdir.ptxgen.render import frame
from urdir.ptxgen.spec import KernelSpec
from urdir.ptxgen.target import Target

#: Texts and programs that are kept: a megabyte each.
KEPT_KERNELS = 1024
_texts: dict[str, str] = {}
_compile_once = functools.lru_cache(maxsize=KEPT_KERNELS)(jit._compile.__wrapped__)
_render = frame.render


def _render_once(spec: KernelSpec, target: Target) -> str:
    if not type(spec).__module__.startswith("urdir."):  # made for a test
        return _render(spec, target)
    key = spec.key(target.name)
    if key not in _texts:
        if len(_texts) == KEPT_KERNELS:
            _texts.clear()
        _texts[key] = _render(spec, target)
    return _texts[key]


@contextmanager
def kept() -> Iterator[None]:
    """Most tests open a device of their own, which has no cache, and many files the same models:
    they would render and compile the same kernels again and again. For tests of models alone:
    others, in the same process, are of rendering itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "render", _render_once)
        patch.setattr(jit, "_compile", _compile_once)
        yield
