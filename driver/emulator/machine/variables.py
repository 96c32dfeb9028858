"""Module-level .global and .const variables: addresses and initial values."""

from __future__ import annotations

import numpy as np

from urdir.driver.emulator.machine.emitter import NUMPY, constant_array
from urdir.driver.emulator.machine.faults import CompileError
from urdir.driver.emulator.machine.memory import Memory
from urdir.ptxgen.ptx import Module


def place_variables(module: Module, memory: Memory) -> dict[str, int]:
    """Allocate and initialise the variables (zeros by default): name -> address.

    The result is the ``symbols`` of every GridExecution of the module's entries. Raises
    CompileError for an extern variable: there is no other module that could define it.
    """
    addresses = {}
    for variable in module.variables:
        if variable.space not in ("global", "const"):
            continue
        if variable.extern:
            raise CompileError(f"PTX line {variable.line}: {variable.name} is not defined")
        element = NUMPY[variable.type]
        values = np.zeros(max(1, variable.nbytes // int(element[1])), element)
        for at, value in enumerate(variable.values):
            array = constant_array(value.value, element, value.kind)
            if array is None:
                raise CompileError(
                    f"PTX line {variable.line}: {variable.name}: {value.value} is not a "
                    f".{variable.type}"
                )
            values[at] = array
        addresses[variable.name] = memory.allocate(values.nbytes)
        memory.write(addresses[variable.name], values)
    return addresses
