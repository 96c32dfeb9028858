"""The operations of the Rust engine realizar on the caller's own buffers and shapes, without a
model file.

A `CachedAttention` is made from sizes; attention and layers then run on device buffers, at once or
recorded (`record`). ``record`` stands for realizar's begin_graph_recording and
end_graph_recording. There are no ``_for_capture`` twins: positions lie in device memory, and one
form of each operation is launched and recorded.
"""

from urdir.model.engine.realizar.attention import (
    flash_attention_multi_head,
    flash_decoding_graphed,
    incremental_attention_async,
    incremental_attention_into,
    paged_attention_into,
)
from urdir.model.engine.realizar.cached import CachedAttention
from urdir.model.engine.realizar.eager import EagerSteps
from urdir.model.engine.realizar.forward import (
    forward_gpu_resident,
    forward_gpu_resident_to_token_id,
)
from urdir.model.engine.realizar.from_sizes import describe, make_weights
from urdir.model.engine.realizar.layers import (
    Layers,
    LayerWeights,
    transformer_layer_indexed,
    transformer_layer_workspace,
)
from urdir.model.engine.realizar.recording import RecordedStep, record

__all__ = [
    "CachedAttention",
    "EagerSteps",
    "LayerWeights",
    "Layers",
    "RecordedStep",
    "describe",
    "flash_attention_multi_head",
    "flash_decoding_graphed",
    "forward_gpu_resident",
    "forward_gpu_resident_to_token_id",
    "incremental_attention_async",
    "incremental_attention_into",
    "make_weights",
    "paged_attention_into",
    "record",
    "transformer_layer_indexed",
    "transformer_layer_workspace",
]
