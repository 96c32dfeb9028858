"""Whether rows of a decode step that chose the same expert read its weights once, and the number of
warps."""

from __future__ import annotations

from urdir.ptxgen.kernels.experts.gemm_small import expected_experts
from urdir.ptxgen.kernels.experts.quartet_memory import LEAST_WARPS, MAX_WARPS
from urdir.ptxgen.target import Target
from urdir.ptxgen.weights.formats import Format

#: Bytes that `ExpertsGemmSmall` must save per layer to be faster: it lists quartets before it loads
#: weights, and another launch adds up its results. Measured on an H200, a
#: layer's products in microseconds, by pairs and by quartets, for rows that choose at random:
#:
#:     rows                       2         3         4         6         8
#:     mixtral-8x7b            90 / 85  129 / 115 165 / 139 220 / 161 274 / 177
#:       megabytes spared           50       136       251       537       871
#:     gpt-oss-20b             39 / 39   55 / 47   72 / 63  105 / 75  133 / 85
#:       megabytes spared            7        20        39        90       155
#:     qwen3-30b-a3b           15 / 21   20 / 25   27 / 31   39 / 39   51 / 47
#:       megabytes spared            2         4         9        21        38
SPARED_NBYTES = 20_000_000


def pays_together(rows: int, experts: int, used: int, expert_nbytes: int) -> bool:
    """Whether `ExpertsGemmSmall` is faster than `ExpertsUp` and `ExpertsDown`, for experts of
    ``expert_nbytes`` each."""
    spared = rows * used - expected_experts(rows, experts, used)
    return spared * expert_nbytes >= SPARED_NBYTES


def most_warps(target: str, fmt: Format) -> int:
    """Warps of a CTA of `ExpertsGemmSmall`, at most: so few that their registers do not spill.

    Of 16 warps a thread has 128 registers, of 12 it has 168. As ptxas of CUDA 13 assembles them,
    128 are enough on sm_90 and sm_100, except for types with a table and groups of 16 (up to seven
    more). Elsewhere most types take up to 20 more; these more than 168 from sm_100 on, and a table
    of two digits on sm_120. On an H200 a step of 8 sequences of qwen3-30b-a3b in NVFP4 takes 2.837
    ms with 12 warps, 2.823 with 16 that spill seven registers, 3.067 with 16 whose tables are
    looked up in other ways that need fewer.
    """
    sm = Target.parse(target).sm
    if fmt.table and fmt.unit_groups == 2:
        return LEAST_WARPS if sm >= 100 else 12
    if fmt.digits == 2 and sm >= 120:
        return LEAST_WARPS
    return MAX_WARPS if 90 <= sm < 120 else 12
