"""Where the matrices of a model lie: on the device, or in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.errors import UnsupportedError
from urdir.model.families.placement import Placement, with_streaming
from urdir.model.memory.streamed import check_host
from urdir.model.memory.weights import streamed_nbytes

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile


def placed(config: Config, file: ModelFile, placement: Placement, devices: int) -> Config:
    """The description with the matrices in host memory that ``placement`` says. Raises ModelError
    for too little host memory, UnsupportedError for several ``devices``."""
    config = with_streaming(config, placement.on_host(config))
    if config.streaming is None:
        return config
    if devices > 1:
        raise UnsupportedError(
            f"weights in host memory for {devices} GPUs are not supported: leave all on the GPUs"
        )
    check_host(streamed_nbytes(file, config))
    return config
