"""Flags that say which model: served ones, and what a model file cannot be or have here."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Accepted, Flag, Refused, Served
from urdir.model.commands.llama_flags.groups import ALL, ANSWERS

MODEL_HELP = (
    "GGUF file, any part of a split one, a folder with config.json and safetensors, "
    "hf:org/repo[:file-or-type] on the Hugging Face hub, or demo"
)

_CACHE_TYPES = ("f16", "bf16", "f32", "q8_0")

FLAGS: tuple[Flag, ...] = (
    Served(
        "-m --model",
        ("model",),
        f"{MODEL_HELP} (default: demo)",
        {"metavar": "FILE"},
        one_of="model",
    ),
    Served(
        "-hf -hfr --hf-repo",
        ("model",),
        "the same as -m hf:ORG/REPO[:TYPE] (default of TYPE: Q4_K_M, or what there is)",
        {"dest": "model", "type": lambda text: f"hf:{text}", "metavar": "ORG/REPO[:TYPE]"},
        one_of="model",
    ),
    Served(
        "-c --ctx-size",
        ("context",),
        "context in tokens; 0: the model's (default: the smaller of the model's and 4096)",
        {"type": values.whole_number(0), "metavar": "N"},
    ),
    Served(
        "-ctk --cache-type-k",
        ("memory",),
        f"how keys are stored: {', '.join(_CACHE_TYPES)} (default: f16); -ctv must be the same",
        {"choices": _CACHE_TYPES, "metavar": "TYPE"},
    ),
    Served(
        "-ctv --cache-type-v",
        ("memory",),
        "how values are stored; -ctk must be the same",
        {"choices": _CACHE_TYPES, "metavar": "TYPE"},
    ),
    Served(
        "-b --batch-size",
        ("memory",),
        "tokens of a prompt that are processed at once, at most (default: 2048, with "
        "--split layers 256)",
        {"type": values.whole_number(1), "metavar": "N"},
    ),
    Served(
        "-ub --ubatch-size",
        ("memory",),
        "the same; the smaller of the two counts",
        {"type": values.whole_number(1), "metavar": "N"},
    ),
    Served(
        "-ngl --gpu-layers --n-gpu-layers",
        ("memory",),
        "every layer is on the GPU: a number of layers or more, all or auto",
        {"type": values.gpu_layers, "dest": "gpu_layers", "metavar": "N"},
    ),
    Refused("-mu --model-url", ANSWERS, "download by URL", "-hf ORG/REPO downloads from the hub"),
    Refused("-dr --docker-repo", ANSWERS, "Docker registry", "-hf ORG/REPO downloads from the hub"),
    Refused("-hff --hf-file", ALL, "separate file name", "give it as -hf ORG/REPO:FILE"),
    Refused("-hft --hf-token", ALL, "token on the command line", "set HF_TOKEN, or hf auth login"),
    Refused("--offline", ALL, "flag for that", "set HF_HUB_OFFLINE=1", takes=0),
    Refused("--lora --lora-scaled", ANSWERS, "LoRA adapter", "merge it into the model file first"),
    Refused(
        "--control-vector --control-vector-scaled --control-vector-layer-range",
        ANSWERS,
        "control vector",
        "there is nothing near",
    ),
    Refused(
        "-mm --mmproj -mmu --mmproj-url --image --audio --video -mmdev --mmproj-device "
        "--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps "
        "--video-timestamp-interval --video-ffmpeg-dir",
        ANSWERS,
        "multi-modal projector: only text is read",
        "describe it in the prompt",
    ),
    Accepted(
        "--mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload",
        ANSWERS,
        "only text is read",
    ),
    Refused(
        "--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
        "--vision-gemma-12b-default --embd-gemma-default --fim-qwen-1.5b-default "
        "--fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
        "--fim-qwen-30b-default",
        ANSWERS,
        "model of that name",
        "-hf ORG/REPO downloads from the hub",
        takes=0,
    ),
    Refused("--override-kv", ANSWERS, "changed metadata", "gguf-set-metadata changes a file's"),
    Refused(
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
        "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
        ANSWERS,
        "RoPE other than the file's",
        "gguf-set-metadata changes a file's",
    ),
)
