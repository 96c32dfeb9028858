"""Exchange kernels between devices, which write into each other's memory."""
