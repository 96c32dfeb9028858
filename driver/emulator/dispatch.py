"""Call convention of the bindings for emulated functions: status first, errors as a status."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import Needs, Refused
from urdir.driver.emulator.state import Driver

SUCCESS = cuda.CUresult.CUDA_SUCCESS


def bind(driver: Driver, function: Any) -> Callable[..., tuple[Any, ...]]:
    """The function as users call it: without the driver parameter, returning tuples."""
    nothing = (None,) * function.results
    results, needs, defers = function.results, function.needs, function.defers
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        with driver.lock:
            if driver.depth and defers:
                driver.defer(functools.partial(function, driver, *args, **kwargs))
                return (SUCCESS,)
            driver.depth += 1
            try:
                if needs is not Needs.NOTHING:
                    driver.require(needs, name)
                if code := driver.injections.strike(name):
                    raise Refused(code, "injected fault")
                value = function(driver, *args, **kwargs)
            except Refused as refusal:
                driver.last_refusal = refusal.message
                return (getattr(cuda.CUresult, refusal.code), *nothing)
            finally:
                driver.depth -= 1
                if driver.deferred and not driver.depth:
                    driver.run_deferred()
        if results == 1:
            return (SUCCESS, value)
        return (SUCCESS, *value) if results else (SUCCESS,)

    call.__signature__ = _signature(function)  # type: ignore[attr-defined]
    return call


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    """The parameters without the driver; every emulated driver has the same."""
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
