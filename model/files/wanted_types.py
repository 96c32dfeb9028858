"""Names of types and recipes that matrices can be quantised to; imports nothing, for the command
line."""

#: Types that the gguf package produces without calibration data and that our kernels read.
PLAIN = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16", "f32")
#: All: llama.cpp's recipe, K-quants, and FP8, which GGUF lacks.
QUANTISED = ("q4_k_m", "q4_k", "q5_k", "q6_k", "fp8", *PLAIN)
