"""Flags that say where and how it runs: CPUs, GPUs, memory."""

from __future__ import annotations

from urdir.model.commands.flags import PERHAPS, VALUE, Accepted, Flag, Refused
from urdir.model.commands.llama_flags.groups import ALL, ANSWERS, BENCH, TEXT

_CPU = "the GPU computes, the CPU waits for it"
_ON_GPU = "nothing is left on the CPU"
_LOADING = "files are read as suits the device"

FLAGS: tuple[Flag, ...] = (
    Accepted("-fa --flash-attn", ANSWERS, "attention is always done in one pass", PERHAPS),
    Accepted("-fa --flash-attn", BENCH, "attention is always done in one pass", VALUE),
    Accepted("-t --threads -tb --threads-batch", ALL, _CPU, VALUE),
    Accepted("-C --cpu-mask -Cr --cpu-range --cpu-strict --poll --prio", ALL, _CPU, VALUE),
    Accepted("-Cb --cpu-mask-batch -Crb --cpu-range-batch --numa", ANSWERS, _CPU, VALUE),
    Accepted("--cpu-strict-batch --poll-batch --prio-batch", ANSWERS, _CPU, VALUE),
    Accepted("--numa", BENCH, _CPU, VALUE),
    Accepted("--mmap --no-mmap --mlock -dio --direct-io -ndio --no-direct-io", ANSWERS, _LOADING),
    Accepted("-mmp --mmap -dio --direct-io", BENCH, _LOADING, VALUE),
    Accepted("-lm --load-mode", ALL, _LOADING, VALUE),
    Accepted("-kvo --kv-offload", ANSWERS, "the cache is on the GPU"),
    Accepted("--op-offload --repack --no-host", ANSWERS, _ON_GPU),
    Accepted("--repack --no-host -nopo --no-op-offload", BENCH, _ON_GPU, VALUE),
    Accepted("-fit --fit", ANSWERS, "memory is checked before anything is loaded", PERHAPS),
    Accepted("-fitt --fit-target -fitc --fit-ctx", ALL, "memory is checked before loading", VALUE),
    Accepted("--swa-full", ANSWERS, "windows keep what they need"),
    Accepted(
        "-ctxcp --ctx-checkpoints --swa-checkpoints -cram --cache-ram", ANSWERS, _ON_GPU, VALUE
    ),
    Accepted("-dt --defrag-thold", ANSWERS, "caches are not fragmented", VALUE),
    Accepted("-np --parallel", TEXT, "a command has one conversation", VALUE),
    Accepted("--check-tensors", ANSWERS, "names, types and sizes of tensors are always checked"),
    Accepted("--warmup --no-warmup", ANSWERS, "nothing is slower the first time but compiling"),
    Accepted("--no-warmup --progress", BENCH, "every test runs once before it is timed"),
    Accepted(
        "-sm --split-mode",
        ALL,
        "--gpus N shares a model among GPUs, --split layers gives each whole layers",
        VALUE,
        values=("none", "layer"),
    ),
    Refused(
        "-nkvo --no-kv-offload", ANSWERS, "cache on the CPU", "-ctk q8_0 -ctv q8_0 halve it", 0
    ),
    Refused("-nkvo --no-kv-offload", BENCH, "cache on the CPU", "-ctk q8_0 halves it", off=0),
    Accepted("-lzm --lazy-mode", ALL, _ON_GPU, VALUE),
    Refused("-cmoe --cpu-moe", ANSWERS, "experts on the CPU", _ON_GPU, takes=0),
    Refused("-ncmoe --n-cpu-moe", ALL, "experts on the CPU", _ON_GPU, off=0),
    Refused("-ncffn --n-cpu-ffn", ANSWERS, "layers on the CPU", _ON_GPU, off=0),
    Refused("-nr --no-repack --no-op-offload", ANSWERS, "weights as stored", _ON_GPU, takes=0),
    Refused("-ot --override-tensor", ALL, "tensor elsewhere", _ON_GPU),
    Refused("-ts --tensor-split", ALL, "uneven parts of a model", "--gpus N makes even ones"),
    Refused("-mg --main-gpu", ALL, "number of a GPU", "--device cuda:i chooses one"),
    Refused("-rpc --rpc", ALL, "remote device", "--device cuda:i is one of this machine"),
    Refused("--list-devices", ALL, "list in this command", "urdir env lists devices", takes=0),
)
