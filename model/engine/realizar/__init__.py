"""The operations of the Rust engine realizar on the caller's own buffers and shapes, without a
model file.

A `CachedAttention` is made from sizes; attention and layers then run on device buffers, at once or
recorded (`record`). ``record`` stands for realizar's begin_graph_recording and
end_graph_recording. There are no ``_for_capture`` twins: positions lie in device memory, and one
form of each operation is launched and recorded.
"""

from urdir.model.engine.realizar.attention import (
    flash_attention_multi_head as flash_attention_multi_head,
)
from urdir.model.engine.realizar.attention import flash_decoding_graphed as flash_decoding_graphed
from urdir.model.engine.realizar.attention import (
    incremental_attention_async as incremental_attention_async,
)
from urdir.model.engine.realizar.attention import (
    incremental_attention_into as incremental_attention_into,
)
from urdir.model.engine.realizar.attention import paged_attention_into as paged_attention_into
from urdir.model.engine.realizar.cached import CachedAttention as CachedAttention
from urdir.model.engine.realizar.forward import forward_gpu_resident as forward_gpu_resident
from urdir.model.engine.realizar.forward import (
    forward_gpu_resident_to_token_id as forward_gpu_resident_to_token_id,
)
from urdir.model.engine.realizar.layers import Layers as Layers
from urdir.model.engine.realizar.layers import (
    transformer_layer_indexed as transformer_layer_indexed,
)
from urdir.model.engine.realizar.layers import (
    transformer_layer_workspace as transformer_layer_workspace,
)
from urdir.model.engine.realizar.made import describe as describe
from urdir.model.engine.realizar.made import make_weights as make_weights
from urdir.model.engine.realizar.recording import RecordedStep as RecordedStep
from urdir.model.engine.realizar.recording import record as record
