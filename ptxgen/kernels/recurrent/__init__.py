"""Kernels of mixers with a state: what a sequence has seen is a few arrays of fixed size.

causal_conv          a short convolution along the tokens of each channel
prefill_conv         the same over prompts
gated_recurrence     linear attention with a decaying state: delta rules, SSD (Mamba-2), lightning
prepare_chunks       of the same for prompts what has no state in it, for all chunks at once
chunked_recurrence   the rest: states moved on chunk by chunk, on tensor cores
"""
