"""Phi 2 and Phi 3 (arXiv 2309.05463, 2404.14219).

Keys: those of `parts` and `rope`, attention.layer_norm_epsilon (Phi 2) or
attention.layer_norm_rms_epsilon (Phi 3). llama.cpp: `src/models/` phi2.cpp, phi3.cpp.
"""

from __future__ import annotations

from urdir.model.families.architectures.gpt import parallel_decoder
from urdir.model.families.dense import plain_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.reader import Reader


def phi2(file: Reader) -> Description:
    """Phi 1, 1.5 and 2: attention and FFN in parallel on one LayerNorm; biases everywhere."""
    return parallel_decoder(file, "half", output_bias="required")


def phi3(file: Reader) -> Description:
    """Phi 3 and 4: LLaMA with fused matrices and LongRoPE (arXiv 2402.13753). As in llama.cpp,
    attention.sliding_window is ignored."""
    return plain_decoder(file, shared_rope(file, "half", factors=True))


ARCHITECTURES = {"phi2": phi2, "phi3": phi3}
