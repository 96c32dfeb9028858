"""`urdir logits`: the logits of every position, as a conformance and debugging tool."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options, prompts, values
from urdir.model.commands.opening import engine_options, open_device, open_engine

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from urdir.model.engine.draft_pair import Pair
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.session_settings import SessionSettings

    Rows = npt.NDArray[np.float32]

EXAMPLES = """\
  urdir logits model.gguf -p "Once upon a time" --output logits.npy
  urdir logits model.gguf --tokens 1,150,298 --output logits.npy
  urdir logits model.gguf --tokens @tokens.txt --output logits.npy --exact
  urdir logits model.gguf --lora-scaled adapter.gguf:0.5 --tokens 1,150,298 --output logits.npy
  urdir logits model.gguf --draft mtp --tokens 1,150,298 --output logits.npz
  urdir logits t5.gguf -p "translate English to German: yes" --decoder-tokens 0,2163 -o logits.npy
"""

#: The value of --draft that selects the prediction heads in the model's own file.
MTP = "mtp"


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "logits", run, "write the logits of every position of a text", EXAMPLES
    )
    options.add_file(parser)
    options.add_llama_flags(parser, "model", "cache")
    options.add_adapters(parser)
    options.add_quantize(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--tokens", metavar="1,2,3|@FILE", help="token ids, or a file of them")
    text.add_argument(
        "-p", "--prompt", type=values.text, metavar="TEXT", help="a text, tokenised as a prompt"
    )
    parser.add_argument(
        "--decoder-tokens",
        metavar="1,2,3|@FILE",
        help="of an encoder-decoder the tokens of its decoder, whose logits are written (default: "
        "its start token); the text is its encoder's",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT.npy",
        help="(n_tokens, n_vocab) float32; with --draft OUT.npz, with logits and draft_logits",
    )
    parser.add_argument(
        "--draft",
        metavar="FILE|mtp",
        help="the logits of a draft as well, which is given the model's hidden states: EAGLE-3, "
        "DFlash, or mtp for the model's own heads; or a model with the same vocabulary",
    )
    parser.add_argument(
        "--exact", action="store_true", help="keep activations, keys and values in f32 throughout"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    options.add_device(parser)
    options.add_gpus(parser)


def run(args: argparse.Namespace) -> int:
    """Feed the tokens one by one and save the rows."""
    tokens = _given_tokens(args)
    output = options.output_file(args)
    found = _with_draft(args, tokens) if args.draft is not None else _logits(args, tokens)
    _save(output, found)
    if args.json:
        shapes = {name: rows.shape for name, rows in found.items()}
        shown = {"shape": shapes["logits"]} if len(shapes) == 1 else {"shapes": shapes}
        print(json.dumps({"output": str(output), **shown}))
    return 0


def _given_tokens(args: argparse.Namespace) -> list[int]:
    """The tokens, read or made of a text: of an encoder-decoder with the one that ends texts."""
    from urdir.model.engine.requests.sources import whole
    from urdir.model.engine.texts import open_texts
    from urdir.model.families.config import Config

    if args.tokens is not None:
        return prompts.read_tokens(args.tokens)
    with open_texts(options.one_model(args), args.quantize) as texts:
        tokens = texts.tokenizer.encode(args.prompt, parse_special=True, add_bos=True)
        if Config.of(texts.file).source is not None:
            tokens = [*whole(tokens, texts.tokenizer)]
    if not tokens:
        raise options.UsageError("-p: an empty text has no tokens")
    return tokens


def _save(output: Path, found: dict[str, Rows]) -> None:
    """Write the logits alone, or all arrays by name."""
    import numpy as np

    from urdir.model.files.written import whole_file

    with whole_file(output, "--output ") as part, part.open("wb") as file:
        if len(found) == 1:
            np.save(file, found["logits"])
        else:
            np.savez(file, logits=found["logits"], draft_logits=found["draft_logits"])


def _logits(args: argparse.Namespace, tokens: list[int]) -> dict[str, Rows]:
    """The logits of the model."""
    from urdir.model.engine.logits import logits_of
    from urdir.model.progress import Progress

    given = args.decoder_tokens
    decoder = None if given is None else prompts.read_tokens(given)
    keys, values = options.cache_types(args)
    wanted = replace(
        engine_options(args, options.one_model(args), max(len(tokens), len(decoder or ()))),
        kv_dtype=keys,
        value_dtype=values,
        exact=args.exact,
    )
    with open_engine(wanted) as engine:
        source: Sequence[int] = ()
        if (of := engine.config.source) is not None:
            source, tokens = tokens, decoder or [of.start]
        elif decoder is not None:
            raise options.UsageError("--decoder-tokens: the model has no encoder")
        _check_tokens([*tokens, *source], engine.config.vocab_size)
        if engine.config.diffuses:
            return {"logits": engine.encoder.logits(tokens, range(len(tokens)))}
        with Progress("logits", len(tokens)) as progress:
            rows = logits_of(engine.session, tokens, progress.advance, source)
    return {"logits": rows}


def _with_draft(args: argparse.Namespace, tokens: list[int]) -> dict[str, Rows]:
    """The logits of the model and of its draft. Incompatible models are refused before a device
    is opened."""
    from urdir.model.engine.draft_pair import file_pair, is_plain, nextn_pair
    from urdir.model.files.demo import DEMO
    from urdir.model.files.source import open_model
    from urdir.model.memory.session_settings import SessionSettings

    if args.decoder_tokens is not None:
        raise options.UsageError("--decoder-tokens: a model with a draft has no encoder")
    if args.gpus is not None:
        raise options.UsageError("--draft runs on one GPU: leave --gpus out")
    keys, values = options.cache_types(args)
    settings = SessionSettings(len(tokens), keys, value_dtype=values, exact=args.exact)
    with ExitStack() as files:
        opened = open_model(options.one_model(args) or DEMO, quantize=args.quantize)
        files.callback(opened.close)
        gguf: ModelFile = opened
        file: ModelFile | None = None
        if args.draft != MTP:
            file = draft = open_model(args.draft)
            files.callback(draft.close)
        if file is not None and is_plain(file):
            return _of_two(args, (gguf, file), tokens, settings)
        pair = nextn_pair(gguf) if file is None else file_pair(gguf, file)
        return _of_pair(args, pair, tokens, settings)


def _of_pair(
    args: argparse.Namespace, pair: Pair, tokens: list[int], settings: SessionSettings
) -> dict[str, Rows]:
    """Logits of a model and of a draft that reads its hidden states. The draft's logits have the
    head as their first axis if the draft is the heads of the model."""
    from urdir.model.engine.block_drafts import BlockDraft
    from urdir.model.engine.chain_drafts import ChainDraft
    from urdir.model.engine.draft_logits import logits_with_block, logits_with_draft, scattered
    from urdir.model.engine.draft_pair import open_pair
    from urdir.model.progress import Progress

    size = pair.config.vocab_size
    _check_tokens(tokens, size)
    # what is drafted after the last token has places of its own
    settings = replace(settings, context=min(len(tokens) + pair.slots, pair.config.context_length))
    with (
        open_device(args) as device,
        open_pair(pair, device, settings, most=pair.most if pair.slots > 1 else 1) as draft,
        Progress("logits", len(tokens)) as progress,
    ):
        if isinstance(draft, BlockDraft):
            logits, drafted = logits_with_block(draft, tokens, progress.advance)
        else:
            assert isinstance(draft, ChainDraft)
            logits, drafted = logits_with_draft(draft, tokens, progress.advance)
    if pair.file is None:
        return {"logits": logits, "draft_logits": drafted}
    rows = drafted.reshape(-1, drafted.shape[-1])  # of one head
    return {"logits": logits, "draft_logits": scattered(rows, pair.token_map, size)}


def _of_two(
    args: argparse.Namespace,
    files: tuple[ModelFile, ModelFile],
    tokens: list[int],
    settings: SessionSettings,
) -> dict[str, Rows]:
    """The logits of a model and of another one with the same vocabulary."""
    from urdir.model.engine.draft_pair import check_takes_drafts, open_alone
    from urdir.model.engine.logits import logits_of
    from urdir.model.families.config import Config
    from urdir.model.progress import Progress
    from urdir.model.text.same_vocabulary import check_same_vocabulary

    configs = [Config.of(file) for file in files]
    check_same_vocabulary(*files)
    for file, config in zip(files, configs, strict=True):
        check_takes_drafts(config, file.path)
        _check_tokens(tokens, config.vocab_size)
    found = []
    with open_device(args) as device, Progress("logits", 2 * len(tokens)) as progress:
        for file, config in zip(files, configs, strict=True):
            with open_alone(file, config, device, settings) as session:
                found.append(logits_of(session, tokens, progress.advance))
    return dict(zip(("logits", "draft_logits"), found, strict=True))


def _check_tokens(tokens: list[int], size: int) -> None:
    if (highest := max(tokens)) >= size:
        raise options.UsageError(f"--tokens: {highest} is outside the vocabulary of {size} tokens")
