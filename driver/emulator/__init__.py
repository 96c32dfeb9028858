"""The emulated GPU: memory, a PTX machine, and the driver API over them."""
