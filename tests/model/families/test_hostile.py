"""Files that lie: every key that a family asks for and every tensor, each with values that cannot
be, or hardly.

Such a file is refused with an error that names the key or the tensor, or it describes a model that
can be run: all numbers finite and within 32 bits, all parts within their tensors. There is never
another exception, and nothing takes long.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.model.families.conftest import RENAMED
from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import StoredMatrix, StoredVector
from urdir.model.files.metadata import Metadata, StringArray
from urdir.ptxgen.kernels.ngram_rows import NgramHash

DATA = Path(__file__).parents[2] / "data"
KINDS = ("families", "encoders", "encoder_decoders")
FILES = sorted(path for kind in KINDS for path in DATA.glob(f"{kind}/*.gguf.xz"))
NAMES = [*(path.name.removesuffix(".gguf.xz") for path in FILES), *RENAMED]
#: How many of them are part of the quick run.
QUICK = 4
#: Seconds that no file may take; thousands of times what they do.
PATIENCE = 5.0
Q4_0, I8, I32 = 2, 24, 26
#: Tensors that files of some architecture may lack (llama.cpp: TENSOR_NOT_REQUIRED).
OPTIONAL = {
    "token_embd.weight",  # CodeShell: the output matrix is there
    "output.weight",
    "output.bias",
    "output_norm.bias",
    "position_embd.weight",
    "rope_freqs.weight",
    "attn_v.weight",  # Gemma 4: keys are values
    "attn_sinks.weight",
    "attn_gate.weight",  # Kimi K3
    "ffn_routed_norm.weight",
    "exp_probs_b",
    "exp_probs_b.bias",
    "ffn_gate_exps.weight",
    "ffn_down_exps.scale",
    "token_types.weight",
    "cls.weight",
    "cls.bias",
    "cls.norm.weight",
    "cls.output.weight",
    "cls.output.bias",
    "dense_2.weight",
    "dense_3.weight",
    "enc.blk.1.attn_rel_b.weight",  # T5: layers without one have the first one's
    "dec.blk.1.attn_rel_b.weight",
}
#: The same of single layers.
OPTIONAL_IN = {"modern-bert": "blk.0.attn_norm.weight"}
#: Matrices that have one row in some files, which have them as a vector.
ROW = {"cls.output.weight", "ffn_gate_inp_shexp.weight", "attn_gate.weight", "ssm_beta.weight"}
Golden = Callable[[str], Any]
Case = TypeVar("Case")

every_golden = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.quick] if index < QUICK else [pytest.mark.slow])
        for index, name in enumerate(NAMES)
    ],
)


def strings(*texts: str) -> StringArray:
    parts, ends, end = [], array("Q"), 0
    for text in texts:
        data = text.encode()
        parts.append(len(data).to_bytes(8, "little") + data)
        end += len(parts[-1])
        ends.append(end)
    return StringArray(memoryview(b"".join(parts)), 0, ends)


#: What any key may be given, whatever it means.
VALUES: dict[str, Any] = {
    **{f"int {n}": n for n in (0, 1, -1, 3, 2**31 - 1, 2**31, 2**63, -(2**63))},
    **{
        f"float {n}": n
        for n in (0.0, 1.5, -0.5, 1e30, 1e300, 1e-300, math.nan, math.inf, -math.inf)
    },
    **{f"bool {n}": n for n in (False, True)},
    **{f"text {n!r}": n for n in ("", "yarn", "x" * 100)},
    "no strings": strings(),
    "strings": strings("a", "b"),
    "arrays": [np.zeros(2, np.int32), np.zeros(1, np.float32)],
    "no numbers": np.array([], np.int32),
    "a number": np.array([2], np.int32),
    "integers": np.array([-1, 0, 2**31 - 1, 5], np.int32),
    "long integers": np.full(500, 2**63 - 1, np.int64),
    "zeros": np.zeros(64, np.uint32),
    "ones": np.ones(64, np.uint32),
    "flags": np.array([True, False] * 40),
    "floats": np.array([math.nan, math.inf, -1.0, 1e30], np.float64),
    "many floats": np.full(300, math.nan, np.float32),
}


def values_of(file: Any) -> dict[str, Any]:
    """`VALUES`, and arrays with a number for each layer."""
    layers = Reader.of(file).layer_count()
    odd = (0, 1, -1, 2**31 - 1, 2**63 - 1, math.nan, 1.5)
    return {**VALUES, "none": None, **{f"{n} by layer": np.full(layers, n) for n in odd}}


def outcome(file: Any, *names: str) -> Config | None:
    """The model that a file describes, or None where it is refused with a text that has one of
    ``names``."""
    begin = time.process_time()
    try:
        config = Config.of(file)
    except (ConfigError, UnsupportedError) as error:
        config = None
        text = str(error)
        assert any(name in text for name in names), text
        assert len(text) < 500, text
    assert time.process_time() - begin < PATIENCE
    if config is not None:
        check(config)
    return config


def check(value: Any) -> None:
    """Whether a part of a description can be run."""
    if isinstance(value, StoredMatrix):
        rows = math.prod(value.shape[:-1])
        assert value.first >= 0
        assert value.each > 0
        assert value.first + value.each <= value.period
        assert rows % value.period == 0
    elif isinstance(value, StoredVector):
        assert value.first >= 0
        assert value.repeat > 0
        assert value.size % value.repeat == 0
        assert value.first + value.size // value.repeat <= math.prod(value.shape)
    elif isinstance(value, NgramHash):
        assert all(0 <= factor < 2**64 for factor in value.multipliers)
        check((value.offsets, value.sizes, value.boundary))
    elif is_dataclass(value):
        if isinstance(value, Attention):
            assert min(value.heads, value.kv_heads, value.key_dim, value.value_dim) > 0
            assert value.heads % value.kv_heads == 0
            assert value.scores  # which kernels refuse for numbers below 0
            assert value.clamp >= 0.0
        if isinstance(value, RopeConfig):
            check_turns(value)
        for field in fields(value):
            check(getattr(value, field.name))
    elif isinstance(value, tuple | list | frozenset):
        for item in value:
            check(item)
    elif isinstance(value, float):
        assert math.isfinite(value)
        assert abs(value) <= float(np.finfo(np.float32).max)
    elif isinstance(value, int):
        assert abs(value) < 2**31
    else:
        assert value is None or isinstance(value, str), value


@cache
def check_turns(rope: RopeConfig) -> None:
    assert 0.0 < rope.rotation.magnitude < 2.0**128
    assert rope.scaling.factor > 0.0
    radians = rope.frequencies()
    assert radians.shape == (rope.dim // 2,)
    assert np.isfinite(radians).all()
    assert (radians >= 0.0).all()


def asked(file: Any) -> list[str]:
    reader = Reader.of(file)
    describe(reader)
    return sorted(reader.asked_keys)


@cache
def _askers(golden: Golden) -> dict[str, list[str]]:
    """The goldens whose families ask for a key, by its name without the architecture's."""
    found = defaultdict(list)
    for name in NAMES:
        for key in asked(golden(name)):
            found[key.partition(".")[2]].append(name)
    return found


@cache
def _holders(golden: Golden) -> dict[str, list[str]]:
    """The goldens that have one tensor of a role, by the role."""
    found = defaultdict(list)
    for name in NAMES:
        for role, count in Counter(map(role_of, golden(name).tensors)).items():
            if count == 1:
                found[role].append(name)
    return found


def share(cases: Sequence[Case], name: str, names: list[str]) -> Sequence[Case]:
    """The cases of one golden: all ``names`` together have each case."""
    step = min(len(names), len(cases))
    return cases[names.index(name) % step :: step]


def with_key(file: Any, key: str, value: Any) -> Any:
    """The same file, but for a key; None: without it."""
    values = {**file.metadata, key: value}
    kept = {k: v for k, v in values.items() if v is not None}
    return replace(file, metadata=Metadata(kept, str(file.path)))


def with_tensor(file: Any, name: str, **changes: Any) -> Any:
    tensors = {**file.tensors, name: replace(file.tensors[name], **changes)}
    return replace(file, tensors=tensors)


def names_of(file: Any, key: str, value: Any) -> tuple[str, ...]:
    """What an error may name: the key itself, and for values of its type also what they are at odds
    with, another key or a tensor."""
    itself = (key, key.rpartition(".")[2])
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if is_number or isinstance(value, np.ndarray | StringArray) or value is None:
        return *itself, f"{file.architecture}.", "metadata key '", "tensor '"
    return itself


def role_of(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def shapes_near(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield (*shape[:-1], shape[-1] + 1)
    yield (2, *shape)
    yield (*shape[:-1], 0)
    if len(shape) > 1:
        yield (math.prod(shape),)
        if shape[0] != shape[-1]:
            yield shape[::-1]


@every_golden
def test_keys_have_values_that_cannot_be(
    name: str, golden: Golden, pytestconfig: pytest.Config
) -> None:
    """The goldens that have a key deal out its values; with ``--full`` each takes all."""
    file, is_full = golden(name), pytestconfig.getoption("--full")
    problems = []
    for key in asked(file):
        values = list(values_of(file).items())
        askers = _askers(golden)[key.partition(".")[2]]
        for label, value in values if is_full else share(values, name, askers):
            try:
                outcome(with_key(file, key, value), *names_of(file, key, value))
            except Exception as error:  # all of them, in one list
                problems.append(f"{key} is {label}: {type(error).__name__} {error}")
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems[:40])


@every_golden
def test_tensors_are_missing(name: str, golden: Golden, pytestconfig: pytest.Config) -> None:
    """Without a tensor that files may lack, another model is described. One of each role, or all
    with ``--full``."""
    file = golden(name)
    unused = set(Config.of(file).unused_tensors)
    roles = Counter(map(role_of, file.tensors))
    tensors = sorted(file.tensors, reverse=NAMES.index(name) % 2 == 1)  # first or last layers
    by_role = {role_of(tensor): tensor for tensor in tensors}
    for missing in tensors if pytestconfig.getoption("--full") else by_role.values():
        rest = {n: t for n, t in file.tensors.items() if n != missing}
        if outcome(replace(file, tensors=rest), "tensor '") is not None:
            role = role_of(missing)
            # where one layer alone is of its kind, its biases are as good as never there
            only_bias = role.endswith(".bias") and roles[role] == 1
            is_first = OPTIONAL_IN.get(file.architecture) == missing
            assert missing in unused or role in OPTIONAL or only_bias or is_first, missing


@every_golden
def test_tensors_are_not_what_they_should_be(
    name: str, golden: Golden, pytestconfig: pytest.Config
) -> None:
    """Layers and files take turns: each change is tried in every sixteenth tensor of a role, and in
    one golden where it is the only one; or in all with ``--full``."""
    file, is_full = golden(name), pytestconfig.getoption("--full")
    unused = set(Config.of(file).unused_tensors)
    roles = Counter(map(role_of, file.tensors))
    begun: Counter[str] = Counter(dict.fromkeys(roles, NAMES.index(name)))
    for tensor in file.tensors.values():
        if tensor.name in unused:
            continue
        role = role_of(tensor.name)
        types = (I8, I32) if len(tensor.shape) > 1 else (I8, I32, Q4_0)
        changes: list[dict[str, Any]] = [
            *({"shape": shape} for shape in shapes_near(tensor.shape)),
            *({"type_id": type_id} for type_id in types),
        ]
        some = changes if is_full else changes[begun[role] % 16 :: 16]
        if roles[role] == 1 and not is_full:
            some = share(changes, name, _holders(golden)[role])
        for change in some:
            changed = with_tensor(file, tensor.name, **change)
            refused = outcome(changed, f"'{tensor.name}'") is None
            is_row = role in ROW and len(tensor.shape) == 1
            assert refused or ("type_id" in change and is_row), (tensor.name, change)
        begun[role] += 1


@every_golden
def test_the_vocabulary_has_another_size_than_the_output(name: str, golden: Golden) -> None:
    """The embedding alone says how many tokens there are."""
    file = golden(name)
    table = "token_embd.weight"
    rows = file.tensors[table].shape[0]
    others = {
        n: replace(t, shape=(rows + 1, *t.shape[1:]))
        for n, t in file.tensors.items()
        if n in (table, "output.weight", "output.bias", "per_layer_token_embd.weight")
        and t.shape[0] == rows  # rows for n-grams are no tokens
    }
    for some in ({table: others[table]}, others):
        config = outcome(replace(file, tensors={**file.tensors, **some}), *others)
        assert config is None or config.vocab_size == rows + 1
        assert config is not None or len(some) < len(others)


@every_golden
def test_tensors_too_many(name: str, golden: Golden) -> None:
    file = golden(name)
    some = next(iter(file.tensors.values()))
    for extra in ("blk.0.other.weight", "other", "blk.999.attn_q.weight", "blk..", "blk.x.ffn_up"):
        tensors = {**file.tensors, extra: replace(some, name=extra)}
        with pytest.raises((ConfigError, UnsupportedError), match=extra.replace(".", r"\.")):
            Config.of(replace(file, tensors=tensors))


def test_factors_that_no_frequency_can_have(golden: Golden) -> None:
    """They are read when a model is loaded: whatever is no positive number is refused by name."""
    found = 0
    for name in NAMES:
        for rope in Config.of(golden(name)).ropes:
            for context in (1, 1 << 20) if rope.factors else ():
                chosen = rope.at_context(context)
                assert chosen.factors is not None
                for bad in (math.nan, math.inf, -math.inf, 0.0, -1.0):
                    factors = np.ones(chosen.factors.size, np.float32)
                    assert (chosen.frequencies(factors) > 0.0).any()
                    factors[-1] = bad
                    with pytest.raises(ConfigError, match=chosen.factors.name):
                        chosen.frequencies(factors)
                found += 1
    assert found > 5
