"""Linear kernels: activations times weight matrices, with what stands before and after them.

`choice` takes a `LinearRequest` and gives one of four products:

    gemv        one row, weights of any type, rounded activations on integer tensor cores
    gemv_f32    1 to 8 rows, everything in f32
    gemm_small  2 to 8 rows: integer tensor cores, or those of the weights' floats (BF16, F16)
    gemm        many rows, f16 tensor cores

All are main loops between steps (`steps`, `product`): values of `prologue` and `epilogue`.
`products` has the main loops; gemm_mma and gemm_wgmma there take packed activations. `cut` says how
a launch is cut into CTAs, warps, passes and rings of tiles; every kernel holds its cut as ``cut``.
`balance` shares SMs among matrices.
"""
