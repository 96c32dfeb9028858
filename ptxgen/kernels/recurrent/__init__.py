"""Kernels of recurrent mixers: a sequence's past is a state of fixed size.

causal_conv          a short convolution over tokens, per channel
prefill_conv         the same for prompts
gated_recurrence     linear attention with a decaying state: delta rules, SSD (Mamba-2), lightning
prepare_chunks       the state-free part of that for prompts, for all chunks at once
chunked_recurrence   the rest: states advanced chunk by chunk, on tensor cores
"""
