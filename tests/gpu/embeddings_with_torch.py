"""Embeddings of the shapes of `urdir bench --embed` by torch and transformers, to compare with.

    python tests/gpu/embeddings_with_torch.py bge-large 512 128

Random weights, F16, no padding, the first token's state. sentence-transformers runs the same
modules, and has tokenising and sorting to do beside. Of several batch sizes the best one counts.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

REPEATS = 5


def model_of(shape: str) -> Any:
    """The model of a shape, in F16 on the GPU."""
    import torch
    import transformers as t

    if shape == "modernbert-large":
        config: Any = t.ModernBertConfig(
            vocab_size=50368,
            hidden_size=1024,
            intermediate_size=2624,
            num_hidden_layers=28,
            num_attention_heads=16,
        )
        model = t.ModernBertModel(config)
    else:
        layers, hidden, heads = {"bert-base": (12, 768, 12), "bge-large": (24, 1024, 16)}[shape]
        config = t.BertConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
        )
        model = t.BertModel(config)
    return model.to("cuda", torch.float16).eval()


def main(shape: str, texts: int, tokens: int) -> None:
    """Print the best time of all texts, and tokens/s."""
    import torch

    model = model_of(shape)
    ids = torch.randint(5, 30000, (texts, tokens), device="cuda")
    mask = torch.ones_like(ids)
    best = float("inf")
    for batch in sorted({min(texts, size) for size in (32, 64, 128, 256, 512)}):
        seconds = []
        for _ in range(REPEATS + 2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.inference_mode():
                made = [
                    model(ids[i : i + batch], mask[i : i + batch]).last_hidden_state[:, 0].cpu()
                    for i in range(0, texts, batch)
                ]
            torch.cat(made)
            seconds.append(time.perf_counter() - start)
        usual = median(seconds[2:])
        best = min(best, usual)
        rate = texts * tokens / usual
        print(
            f"{shape} {texts} x {tokens}, batches of {batch}: {1e3 * usual:.3f} ms, {rate:,.0f}/s"
        )
    print(f"best: {1e3 * best:.3f} ms, {texts * tokens / best:,.0f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
