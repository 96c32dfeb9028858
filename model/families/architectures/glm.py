"""GLM (arXiv 2406.12793): partial RoPE, gate and up stored as one matrix.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; for GLM 4 of 2025
rope.dimension_sections. llama.cpp: `src/models/` chatglm.cpp, glm4.cpp.
"""

from __future__ import annotations

from urdir.model.families.dense import plain_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.parts import head_dims
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope_by_axes


def chatglm(file: Reader) -> Description:
    """ChatGLM 2 and 3, GLM 4 of 2024."""
    return plain_decoder(file, shared_rope(file, "interleaved"))


def glm4(file: Reader) -> Description:
    """GLM 4 of 2025: norms after attention and FFN too. Multi-axis positions (GLM 4V) rotate halves
    instead of neighbours."""
    rope = read_rope_by_axes(file, head_dims(file)[0])
    return plain_decoder(file, rope, post_norms=("post_attention_norm", "post_ffw_norm"))


ARCHITECTURES = {"chatglm": chatglm, "glm4": glm4}
