"""The CUDA driver API, real or emulated: memory, modules, streams, plans and graphs."""
