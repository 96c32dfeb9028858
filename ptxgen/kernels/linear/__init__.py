"""Linear kernels: activations times weight matrices, with norm, gate and residual.

`choice` takes a `LinearRequest` and gives one of four kernels:

    gemv        one row, weights of any type, rounded activations on integer tensor cores
    gemv_f32    1 to 8 rows, everything in f32
    gemm_small  2 to 8 rows, quantised weights, integer tensor cores
    gemm        many rows, f16 tensor cores

The first three share `spec`. `tiled` and `cut` are for gemv and gemm_small: how a launch is cut
into CTAs, warps, passes and rings of tiles. Every kernel holds its cut as ``cut``. `balance` shares
SMs among matrices. `summary` describes what gemm_small writes so that the next norm is half done.
`ends` checks what follows a product, and has words for it.
"""
