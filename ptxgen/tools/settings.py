"""Specs from text: fields of a kernel by name, with values from a command line.

``specialise(GemvF32, ["format=Q4_K", "rows=4096"])`` replaces fields of the first example that
permits them. A field that is a record is set part by part, ``layout.head_dim=128``; the part's name
alone suffices if only one record has it, ``head_dim=128``. So is a step of a product, by its stem:
``residual.scale=0.5``, of the first example that has one; ``residual=no`` removes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from urdir.ptxgen.errors import PtxgenError, SettingError
from urdir.ptxgen.ptx.architecture import MAX_GRID
from urdir.ptxgen.spec import KernelSpec, smallest_example
from urdir.ptxgen.weights.formats import FORMATS, Format

S = TypeVar("S", bound=KernelSpec)

#: Exceptions that a constructor or a launch shape may raise for inconsistent numbers.
_REFUSALS = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)

_NONE = ("none", "")
_BOOLEANS: Mapping[str, bool] = {
    "true": True, "yes": True, "1": True, "false": False, "no": False, "0": False,
}  # fmt: skip


class _NoFieldError(SettingError):
    """An example has no such field; another one may."""


@dataclasses.dataclass(frozen=True, slots=True)
class FieldInfo:
    """A settable field of a spec: dotted ``name``, ``type`` as text, default and example.

    ``default`` is None without a default (then ``has_default`` is False); ``example`` is the value
    in the kernel's first example.
    """

    name: str
    type: str
    has_default: bool
    default: Any
    example: Any


def fields_of(kernel: type[KernelSpec]) -> tuple[FieldInfo, ...]:
    """Every settable field, including parts of records, in order of declaration."""
    return tuple(_fields(kernel, smallest_example(kernel), ""))


def plain(value: Any) -> Any:
    """A field's value for printing and JSON: a format by its name, a record as a dictionary, a step
    of a product as one with its name."""
    if isinstance(value, Format):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        step = {"step": value.stem} if hasattr(value, "stem") else {}
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return step | fields
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def specialise(kernel: type[S], settings: Sequence[str] = ()) -> S:
    """The kernel's first example that permits ``settings`` ("field=value"), with them applied.

    Raises SettingError, in one line, for an unknown field, a value of the wrong type, and
    inconsistent fields: the first example's error.
    """
    refused: list[SettingError] = []
    for example in kernel.examples().values():
        try:
            return respecialise(example, settings)
        except SettingError as exc:
            refused.append(exc)
    raise next((exc for exc in refused if not isinstance(exc, _NoFieldError)), refused[0])


def respecialise(spec: S, settings: Sequence[str]) -> S:
    """``spec`` with ``settings`` applied; see ``specialise``."""
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise SettingError(f"{setting!r} is not a setting: write field=value")
        values[_full_name(spec, name.strip(), value.strip())] = value.strip()
    try:
        made: S = _replace(spec, values, type(spec).name)
        grid = made.launch_shape.grid
        if any(not 1 <= n <= most for n, most in zip(grid, MAX_GRID, strict=True)):
            raise ValueError(f"a grid of {grid} CTAs, where (1, 1, 1) to {MAX_GRID} can be")
        for param in made.params:
            if any(extent < 1 for extent in made.shape_of(param)):
                raise ValueError(f"its {param.name} would be of shape {made.shape_of(param)}")
    except SettingError:
        raise
    except PtxgenError as exc:
        raise SettingError(str(exc)) from exc
    except _REFUSALS as exc:
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        raise SettingError(
            f"kernel {type(spec).name} cannot have {shown}: {' '.join(str(exc).split())}"
        ) from exc
    return made


def _fields(record: type[Any], example: Any, prefix: str) -> Iterator[FieldInfo]:
    for field, hint in _declared(record):
        value = None if example is None else getattr(example, field.name)
        listed = value if isinstance(value, tuple) else ()
        steps = [item for item in listed if hasattr(item, "stem")]
        value = None if isinstance(value, tuple) else value  # lists are not set by text
        inner = _record_of(hint)
        if inner is not None and value is not None:
            yield from _fields(type(value), value, f"{prefix}{field.name}.")  # one of several kinds
            continue
        has_default = field.default is not dataclasses.MISSING
        default = plain(field.default) if has_default else None
        yield FieldInfo(prefix + field.name, _text(hint), has_default, default, plain(value))
        if inner is not None:
            yield from _fields(inner, None, f"{prefix}{field.name}.")
        for step in steps:
            dotted = f"{prefix}{field.name}.{step.stem}"
            yield FieldInfo(dotted, "bool", True, False, True)
            yield from _fields(type(step), step, f"{dotted}.")


def _declared(record: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = _hints(record)  # type: ignore[arg-type]  # mypy takes no class for hashable
    for field in dataclasses.fields(record):
        yield field, hints.get(field.name, field.type)


@functools.cache
def _hints(record: type[Any]) -> Mapping[str, Any]:
    """The types of a record's fields, cached because they take long to resolve."""
    try:
        return typing.get_type_hints(record)
    except NameError:  # a type that its module imports for type checkers only
        return {}


def _full_name(kernel: KernelSpec, name: str, value: str) -> str:
    """The dotted name of a field given in full or by its last part; a record cannot be set by a
    single value except none."""
    known = [info.name for info in _fields(type(kernel), kernel, "")]
    records = {dotted.rpartition(".")[0] for dotted in known}
    if name in known or (name in records and value.lower() in _NONE):
        return name
    found = [dotted for dotted in known if dotted.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if name in records:
        parts = ", ".join(n for n in known if n.startswith(f"{name}."))
        raise SettingError(f"kernel {kernel.name}: set the parts of {name}: {parts}")
    raise _NoFieldError(f"kernel {kernel.name} has no field {name!r}: one of {', '.join(known)}")


def _replace(record: Any, values: Mapping[str, str], where: str) -> Any:
    """``record`` with dotted fields replaced, all fields of one (inner) record at once."""
    hints = {field.name: hint for field, hint in _declared(type(record))}
    changed: dict[str, Any] = {}
    for name, hint in hints.items():
        whole = values.get(name)
        parts = {n[len(name) + 1 :]: v for n, v in values.items() if n.startswith(f"{name}.")}
        if whole is not None:
            changed[name] = _value(hint, whole, f"{where}: {name}")
        elif parts:
            inner, place = getattr(record, name), f"{where}.{name}"
            if inner is None:
                changed[name] = _make(_record_of(hint), parts, place)
            else:
                change = _replace_steps if isinstance(inner, tuple) else _replace
                changed[name] = change(inner, parts, place)
    return dataclasses.replace(record, **changed) if changed else record


def _replace_steps(steps: Any, values: Mapping[str, str], where: str) -> Any:
    """Steps of a product with dotted fields replaced, and without those that are switched off."""
    made = []
    for step in steps:
        place, dotted = f"{where}.{step.stem}", f"{step.stem}."
        if _value(bool, values.get(step.stem, "yes"), place):
            parts = {n[len(dotted) :]: v for n, v in values.items() if n.startswith(dotted)}
            made.append(_replace(step, parts, place))
    return tuple(made)


def _make(record: Any, values: Mapping[str, str], where: str) -> Any:
    """A record that the example lacks: every field without a default must be given."""
    given: dict[str, Any] = {}
    missing = []
    for field, hint in _declared(record):
        name, place = field.name, f"{where}.{field.name}"
        parts = {n[len(name) + 1 :]: v for n, v in values.items() if n.startswith(f"{name}.")}
        if name in values:
            given[name] = _value(hint, values[name], place)
        elif parts:
            given[name] = _make(_record_of(hint), parts, place)
        elif field.default is dataclasses.MISSING:
            missing.append(name)
    if missing:
        raise SettingError(f"{where} is unset, so {', '.join(missing)} must be given, too")
    return record(**given)


def _value(hint: Any, text: str, where: str) -> Any:
    """``text`` as a value of the type ``hint``."""
    options = _options(hint)
    if type(None) in options and text.lower() in _NONE:
        return None
    for option in options:
        value = _as_option(option, text)
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingError(f"{where}={text}: not a finite number")
        if value is not None:
            return value
    raise SettingError(f"{where}={text}: not {_text(hint)}")


def _as_option(option: Any, text: str) -> Any:
    """``text`` as a value of one type; None where it is none."""
    if typing.get_origin(option) is Literal:
        return next((each for each in typing.get_args(option) if str(each) == text), None)
    if option is Format:
        return {name.lower(): each for name, each in _formats().items()}.get(text.lower())
    if option is bool:
        return _BOOLEANS.get(text.lower())
    if option not in (int, float, str):
        return None
    try:
        return option(text)
    except ValueError:
        return None


def _formats() -> Mapping[str, Format]:
    return {value.name: value for value in FORMATS.values()}


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def _record_of(hint: Any) -> type[Any] | None:
    """The record type among a hint's options, if there is one."""
    for option in _options(hint):
        if isinstance(option, type) and dataclasses.is_dataclass(option) and option is not Format:
            return option
    return None


def _text(hint: Any) -> str:
    """A type for users."""
    words = []
    for option in _options(hint):
        if typing.get_origin(option) is Literal:
            words.append(" or ".join(map(str, typing.get_args(option))))
        elif option is Format:
            words.append("one of " + ", ".join(_formats()))
        elif option is type(None):
            words.append("none")
        else:
            words.append(getattr(option, "__name__", str(option)))
    return " or ".join(words)
