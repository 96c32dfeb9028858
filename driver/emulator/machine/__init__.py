"""The PTX machine: translates entries to numpy code and runs grids over emulated memory."""
