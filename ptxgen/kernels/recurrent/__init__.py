"""Kernels of mixers with a state: what a sequence has seen is a few arrays of fixed size.

causal_conv          a short convolution along the tokens of each channel
gated_recurrence     linear attention with a decaying state: delta rules, SSD (Mamba-2), lightning
chunked_recurrence   the same for prompts, by chunks of tokens on tensor cores
"""
