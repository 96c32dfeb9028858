"""Lint of PTX: errors that the assembler accepts.

=====================  =========================================================================
rule                   finding
=====================  =========================================================================
syntax                 the text does not parse: an unknown label or register, a register that
                       shadows a special one
threads                more threads in a CTA than any target has
static-shared          more static shared memory than any target has
float-on-bits          f32 or f64 arithmetic on a register declared by its bits (`.b32`): moves,
                       loads, stores, shuffles, selections by bits and atomics may do that
read-before-write      a register read where some path has not written it; a predicated write
                       counts under its own predicate, or beside one under the opposite predicate
divergent-barrier      `bar.sync` of the whole CTA, or `barrier.cluster` with `.aligned`, on one
                       side of a branch that threads of one CTA may decide differently
missing-ret            the end of the entry reached without `ret`
unreachable            instructions that no path reaches
unused-register        a register that nothing reads (a numbered range counts as one)
unused-label           a label that no branch names
ignored-setmaxnreg     `setmaxnreg` in an entry with neither `.maxnreg` nor `.minnctapersm`: the
                       assembler ignores it there
indirect-branch        `brx` or `call`, whose targets are not followed here
=====================  =========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from urdir.ptxgen import ptx
from urdir.ptxgen.ptx.architecture import MAX_THREADS, STATIC_SHARED_LIMIT
from urdir.ptxgen.ptx.flow import (
    LEAVES,
    Block,
    blocks,
    branch_target,
    post_dominators,
    reachable,
    reads,
    registers,
    writes,
)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One violation: the line of the PTX text (from 1), the rule, and what breaks it."""

    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.message}"


def lint(text: str, parse: Callable[[str], ptx.Module] = ptx.parse) -> tuple[Finding, ...]:
    """All findings in a PTX text, by line; text that does not parse has one, of rule "syntax".

    ``parse`` is `ptx.parse`, or a caching replacement.
    """
    try:
        module = parse(text)
    except ptx.PtxSyntaxError as exc:
        return (Finding(exc.line, "syntax", f"{exc.reason}: {exc.text}"),)
    lines = text.split("\n")
    found = {f for entry in module.entries.values() for f in _lint_entry(module, entry, lines)}
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class _Subject:
    module: ptx.Module
    entry: ptx.Entry
    graph: tuple[Block, ...]
    lines: Sequence[str]


def _lint_entry(module: ptx.Module, entry: ptx.Entry, lines: Sequence[str]) -> Iterator[Finding]:
    for i in entry.instructions:
        if i.parts[0] in ("brx", "call"):
            yield Finding(i.line, "indirect-branch", f"{i.opcode} is not followed")
            return
    subject = _Subject(module, entry, blocks(entry), lines)
    for rule in _RULES:
        yield from rule(subject)


def _threads(s: _Subject) -> Iterator[Finding]:
    for directive in ("maxntid", "reqntid"):
        threads = 1
        for extent in s.entry.directives.get(directive, ()):
            threads *= extent
        if threads > MAX_THREADS:
            message = f".{directive} asks for {threads} threads, a CTA has at most {MAX_THREADS}"
            yield Finding(s.entry.line, "threads", message)


def _static_shared(s: _Subject) -> Iterator[Finding]:
    used = 0
    for v in (*s.module.variables, *s.entry.variables):
        if v.space == "shared" and not v.extern:
            used = -(-used // v.align) * v.align + v.nbytes
            if used > STATIC_SHARED_LIMIT:
                message = f"{v.name} ends at byte {used}, the limit is {STATIC_SHARED_LIMIT}"
                yield Finding(v.line, "static-shared", message)
                return


_FLOAT_ARITHMETIC = re.compile(
    r"(add|sub|mul|fma|mad|div|rcp|r?sqrt|ex2|lg2|sin|cos|tanh|min|max|abs|neg|setp?|selp|slct"
    r"|testp|copysign|cvt)$"
)


def _float_on_bits(s: _Subject) -> Iterator[Finding]:
    for i in s.entry.instructions:
        if not _FLOAT_ARITHMETIC.match(i.parts[0]):
            continue
        for operand, type_ in zip(i.operands, _operand_types(i), strict=False):
            for name in registers(operand) if type_ in ("f32", "f64") else ():
                declared = s.entry.registers.get(name, "")
                if declared.startswith("b"):
                    message = f"{i.opcode} on {name}, which is .{declared}: {i.text}"
                    yield Finding(i.line, "float-on-bits", message)


def _operand_types(i: ptx.Instruction) -> Sequence[str]:
    """The type of each operand; "" if the rule ignores it (predicates)."""
    types = [part for part in i.parts[1:] if re.fullmatch(r"[bfsu]\d+|bf16|\w+x2|pred", part)]
    if not types:
        return ()
    if i.parts[0] in ("cvt", "set", "slct") and len(types) == 2:
        return (types[0], *[types[1]] * 3)
    result = "" if i.parts[0] in ("setp", "testp") else types[-1]
    return (result, *[types[-1]] * 3)


# A written register, or one written if a predicate (name, negated) holds.
_Fact = str | tuple[str, str, bool]


def _read_before_write(s: _Subject) -> Iterator[Finding]:
    known = _written_before(s)
    for block, facts in zip(s.graph, known, strict=True):
        if facts is None:
            continue  # unreachable
        state = set(facts)
        for i in block.instructions:
            for name in dict.fromkeys(reads(i)):
                if name in s.entry.registers and not _is_written(name, i, state):
                    message = f"{name} may not have been written: {i.text}"
                    yield Finding(i.line, "read-before-write", message)
            _write(s, i, state)


def _written_before(s: _Subject) -> list[frozenset[_Fact] | None]:
    """The facts at the start of each block that hold on every path to it (None: unreachable)."""
    known: list[frozenset[_Fact] | None] = [None] * len(s.graph)
    known[0] = frozenset()
    waiting = [0]
    while waiting:
        index = waiting.pop()
        state = set(known[index] or ())
        for i in s.graph[index].instructions:
            _write(s, i, state)
        for successor in s.graph[index].successors:
            before = known[successor]
            joined = frozenset(state) if before is None else before & state
            if joined != before:
                known[successor] = joined
                waiting.append(successor)
    return known


def _is_written(name: str, i: ptx.Instruction, state: set[_Fact]) -> bool:
    if name in state:
        return True
    guard = i.predicate
    return guard is not None and (name, guard.name, guard.negated) in state


def _write(s: _Subject, i: ptx.Instruction, state: set[_Fact]) -> None:
    guard = i.predicate
    for name in writes(i):
        if s.entry.registers.get(name) == "pred":  # what held under its old value
            state -= {f for f in state if isinstance(f, tuple) and f[1] == name}
        if guard is None or (name, guard.name, not guard.negated) in state:
            state.add(name)
        elif name not in state:
            state.add((name, guard.name, guard.negated))


_THREAD_DEPENDENT = re.compile(r"%(tid|laneid|warpid|lanemask|clock|globaltimer|smid)")


def _divergent_barrier(s: _Subject) -> Iterator[Finding]:
    barriers = [
        (index, i)
        for index, block in enumerate(s.graph)
        for i in block.instructions
        if _is_for_all(i)
    ]
    if not barriers:
        return
    varying = _varying(s.entry)
    after = post_dominators(s.graph)
    forks = [
        (block.instructions[-1], _apart(s.graph, fork, after))
        for fork, block in enumerate(s.graph)
        if _forks(block, varying)
    ]
    for index, barrier in barriers:
        if barrier.predicate and barrier.predicate.name in varying:
            message = f"{barrier.text} under {barrier.predicate.name}, which varies"
            yield Finding(barrier.line, "divergent-barrier", message)
        for last, apart in forks:
            if index in apart:
                message = f"{barrier.text} after line {last.line}, not by all threads: {last.text}"
                yield Finding(barrier.line, "divergent-barrier", message)


def _is_for_all(i: ptx.Instruction) -> bool:
    """Whether all threads of the CTA must reach a barrier at the same instruction."""
    if i.parts[:2] == ("barrier", "cluster"):
        return "aligned" in i.parts  # otherwise each thread may arrive at its own place
    return i.parts[:2] in (("bar", "sync"), ("barrier", "sync")) and len(i.operands) == 1


def _forks(block: Block, varying: set[str]) -> bool:
    """Whether threads of one CTA may leave the block by different branches."""
    last = block.instructions[-1] if block.instructions else None
    if not last or not last.predicate or last.predicate.name not in varying:
        return False
    if "uni" in last.parts:  # the author says that threads go the same way (PTX ISA, bra)
        return False
    return last.parts[0] in LEAVES or len(block.successors) > 1


def _apart(graph: Sequence[Block], fork: int, after: Sequence[frozenset[int]]) -> set[int]:
    """The blocks between a fork and the first one that every path from it passes."""
    together = after[fork] - {fork}
    seen: set[int] = set()
    waiting = [n for n in graph[fork].successors if n not in together]
    while waiting:
        index = waiting.pop()
        if index not in seen:
            seen.add(index)
            waiting.extend(n for n in graph[index].successors if n not in together)
    return seen


def _varying(entry: ptx.Entry) -> set[str]:
    """The registers whose value may differ between the threads of a CTA: computed from a thread's
    number, directly or not, or loaded from a varying address."""
    found: set[str] = set()
    flow = [(reads(i), writes(i)) for i in entry.instructions if i.parts[0] != "atom"]
    for sources, results in flow:
        if any(map(_THREAD_DEPENDENT.match, sources)):
            found.update(results)
    found.update(*(writes(i) for i in entry.instructions if i.parts[0] == "atom"))
    size = -1
    while size != len(found):
        size = len(found)
        for sources, results in flow:
            if not found.isdisjoint(sources):
                found.update(results)
    return found


def _missing_ret(s: _Subject) -> Iterator[Finding]:
    runs = reachable(s.graph)
    for index, block in enumerate(s.graph):
        if block.falls_off and index in runs:
            last = block.instructions[-1].line if block.instructions else s.entry.line
            yield Finding(last, "missing-ret", f"{s.entry.name} may end without ret")


def _unreachable(s: _Subject) -> Iterator[Finding]:
    runs = reachable(s.graph)
    for index, block in enumerate(s.graph):
        if index not in runs and block.instructions:
            first = block.instructions[0]
            yield Finding(first.line, "unreachable", f"no path reaches {first.text}")


def _unused_register(s: _Subject) -> Iterator[Finding]:
    read: set[str] = set()
    in_vector: set[str] = set()
    for i in s.entry.instructions:
        read.update(map(_range, reads(i)))
        if i.operands and isinstance(i.operands[0], ptx.Vector):
            in_vector.update(writes(i))  # a vector load may bring more than is wanted
    for name in s.entry.registers:
        if _range(name) not in read and name not in in_vector:
            yield Finding(_declared(s, name), "unused-register", f"nothing reads {name}")


def _declared(s: _Subject, name: str) -> int:
    """The line that declares a register (the entry's if a scope has renamed it)."""
    pattern = re.compile(rf"\.reg\b.*{re.escape(_range(name))}\d*(<\d+>)?[ ,;]")
    for number in range(s.entry.line, len(s.lines)):
        if pattern.search(s.lines[number]):
            return number + 1
    return s.entry.line


def _range(name: str) -> str:
    return re.sub(r"\d+(\$\d+)?$", "", name)


def _unused_label(s: _Subject) -> Iterator[Finding]:
    used = {branch_target(i) for i in s.entry.instructions}
    for item in s.entry.body:
        if isinstance(item, ptx.Label) and item.name not in used:
            yield Finding(item.line, "unused-label", f"no branch goes to {item.name}")


def _ignored_setmaxnreg(s: _Subject) -> Iterator[Finding]:
    if {"maxnreg", "minnctapersm"} & s.entry.directives.keys():
        return
    for i in s.entry.instructions:
        if i.parts[0] == "setmaxnreg":
            yield Finding(i.line, "ignored-setmaxnreg", "needs .maxnreg or .minnctapersm")


_RULES: tuple[Callable[[_Subject], Iterator[Finding]], ...] = (
    _threads,
    _static_shared,
    _float_on_bits,
    _read_before_write,
    _divergent_barrier,
    _missing_ret,
    _unreachable,
    _unused_register,
    _unused_label,
    _ignored_setmaxnreg,
)
