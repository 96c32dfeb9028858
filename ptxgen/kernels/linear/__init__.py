"""Linear kernels: activations times weight matrices, with the operations before and after.

`choice` chooses among the first three for a `LinearRequest`, `packed_choice` between the last two:

    gemv        one row, weights of any type, rounded activations on integer tensor cores
    gemv_f32    1 to 8 rows, everything in f32
    gemm_small  2 to 8 rows: integer tensor cores, or those of the weights' floats (BF16, F16)
    gemm        many rows, f16 tensor cores
    gemm_mma, gemm_wgmma  many rows packed as f16

All are main loops between steps (`steps`, `product`): values of `prologue` and `epilogue`.
`products` has the main loops. `cut` says how a launch is cut into CTAs, warps, passes and rings of
tiles; every kernel holds its cut as ``cut``. `balance` shares SMs among matrices.
"""
