"""Served flags of llama-bench and llama-batched-bench."""

from __future__ import annotations

from urdir.model.commands import values
from urdir.model.commands.flags import Served

BENCH = ("bench",)

SERVED: tuple[Served, ...] = (
    *(
        Served(
            names, BENCH, text, {"type": kind, "default": default, "dest": dest, "metavar": "N,..."}
        )
        for dest, names, kind, default, text in (
            (
                "n_prompt",
                "-p --n-prompt",
                values.number_list(0),
                (512,),
                "prompt tokens, 0 for none (512)",
            ),
            (
                "n_gen",
                "-n --n-gen",
                values.number_list(0),
                (128,),
                "tokens decoded, 0 for none (128)",
            ),
            (
                "n_depth",
                "-d --n-depth --depth",
                values.number_list(0),
                (0,),
                "tokens of context before (0)",
            ),
            (
                "sequences",
                "-npl --n-parallel --sequences",
                values.number_list(1),
                (1,),
                "sequences that are decoded together, as in llama-batched-bench (1)",
            ),
        )
    ),
    Served(
        "-pg",
        BENCH,
        "a prompt and tokens decoded after it, timed together; repeatable",
        {"type": values.number_pair, "action": "append", "default": [], "metavar": "PP,TG"},
    ),
    Served(
        "-r --repetitions",
        BENCH,
        "runs of each test (5)",
        {"type": values.whole_number(1), "default": 5, "metavar": "N"},
    ),
    Served(
        "-o --output",
        BENCH,
        "how to print it: md, csv, json, jsonl or sql (md)",
        {"choices": ("md", "csv", "json", "jsonl", "sql"), "default": "md", "metavar": "FORM"},
    ),
)
