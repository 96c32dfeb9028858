"""Quantised checkpoints: stored tensors of a quantised matrix as one tensor of a block type.

`scheme` reads ``quantization_config``; `modules` finds the tensors that belong together and gives
them the name that the float tensor would have; the other files make blocks of rows as they are
read. Block types: `urdir.ptxgen.weights.formats` (E4M3, E2M1, W2 ... W8, MXFP4).
"""
