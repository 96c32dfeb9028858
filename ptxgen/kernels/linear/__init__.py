"""Linear kernels: activations times weight matrices, with what comes before and after.

`choice` takes a `LinearRequest` and gives one of four kernels:

    gemv        one row, weights of any type, rounded activations on integer tensor cores
    gemv_f32    1 to 8 rows, everything in f32
    gemm_small  2 to 8 rows, quantised weights, integer tensor cores
    gemm        many rows, f16 tensor cores

`spec` is what the first three share, `tiled` and `cut` what gemv and gemm_small do: how a launch is
cut into CTAs, warps, passes and rings of tiles. Every kernel holds its cut as ``cut``. `balance`
shares SMs among matrices; `summary` is what gemm_small leaves for the norm that follows.
"""
