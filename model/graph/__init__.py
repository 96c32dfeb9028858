"""Operations of a step on virtual tensors: what is computed, never how."""
