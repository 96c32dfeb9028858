"""PTX targets, and the ISA version and architecture that instructions need.

The facts about architectures themselves are in ``ptx/architecture.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from urdir.ptxgen.errors import PtxgenError, SettingError
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, FIRST_VERSION, Version, number_of

#: Targets for which PTX is generated.
TARGETS = tuple(t for t in FIRST_VERSION if number_of(t) in ARCHITECTURES)

#: Architectures for which the tests assemble every kernel.
TESTED = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@functools.cache
def since(sm: int) -> tuple[str, ...]:
    """The portable targets from an architecture on: ("sm_90", "sm_100", ...) for 90."""
    return tuple(f"sm_{number}" for number in ARCHITECTURES if number >= sm)


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """An instruction, modifier or register that some versions or targets lack."""

    pattern: re.Pattern[str]
    version: Version
    sm: int
    #: If not empty: the only targets that have it (architecture-specific features).
    only: frozenset[str] = frozenset()

    def reason_against(self, target: Target) -> str | None:
        """The requirement that ``target`` does not meet, or None."""
        if self.only and target.name not in self.only:
            return " or ".join(sorted(self.only))
        return f"sm_{self.sm}" if target.sm < self.sm else None


# Pattern in the text -> first ISA version, first architecture (PTX ISA, each instruction's "PTX
# ISA Notes" and "Target ISA Notes"; the tests hold every row against the assembler).
FEATURES: tuple[Feature, ...] = tuple(
    Feature(re.compile(pattern), version, sm, frozenset(only))
    for pattern, version, sm, *only in (
        # asynchronous copies
        (r"\bcp\.async\.", (7, 0), 80),
        (r"\bcp\.async\.bulk\b", (8, 0), 90),
        (r"\bcp\.async\.bulk\.shared::cta\.global\b", (8, 6), 90),
        (r"\bst\.async\b", (8, 1), 90),
        (r"\bst\.bulk\b", (8, 6), 100),
        # barriers, clusters, launches
        (r"\bmbarrier\.", (7, 0), 80),
        (r"\bmbarrier\.test_wait\.parity\b", (7, 1), 80),
        (r"\bmbarrier\.arrive\.[\w.:]* +_", (7, 1), 80),
        (r"\bmbarrier\.try_wait\b", (7, 8), 90),
        (r"\bmbarrier\.[\w.:]*\b(expect_tx|acquire|release|relaxed)\b", (8, 0), 90),
        (r"\bmbarrier\.[\w.]*\.shared::cluster\b", (8, 0), 90),
        (r"\bmbarrier\.(arrive|test_wait|try_wait)\b[\w.]*\.relaxed\b", (8, 6), 90),
        (r"\bfence\.proxy\.async\b", (8, 0), 90),
        (r"\bfence\.mbarrier_init\b", (8, 0), 90),
        (r"\bfence\.(acquire|release)\b", (8, 6), 90),
        (r"\bbarrier\.cta\.", (7, 8), 75),
        (r"\bbarrier\.cluster\.", (7, 8), 90),
        (r"\bbarrier\.cluster\.[\w.]*\b(relaxed|acquire|release)\b", (8, 0), 90),
        (r"\bmapa\b", (7, 8), 90),
        (r"%(n?cluster(_n?cta)?|is_explicit_cluster)", (7, 8), 90),
        (r"::cta\b", (7, 8), 75),
        (r"::cluster\b", (7, 8), 90),
        (r"\bgriddepcontrol\b", (7, 8), 90),
        (r"\belect\.sync\b", (8, 0), 90),
        (r"\bclusterlaunchcontrol\b", (8, 6), 100),
        (r"\bsetmaxnreg\b", (8, 0), 90, "sm_90a", "sm_100a", "sm_103a", "sm_120a"),
        # matrix products
        (r"\bldmatrix\b", (6, 5), 75),
        (r"\bmovmatrix\b", (7, 8), 75),
        (r"\bstmatrix\b", (7, 8), 90),
        (r"\bmma\.sync\.aligned\.(m16n8k8|m8n8k16)\b", (6, 5), 75),
        (r"\bmma\.sync\.aligned\.m16n8k(16|32)\b", (7, 0), 80),
        (r"\bmma\.sync\.[\w.]*\.(bf16|tf32)\b", (7, 0), 80),
        (r"\bmma\.sync\.[\w.]*\.(e4m3|e5m2)\b", (8, 4), 89),
        (r"\bwgmma\.", (8, 0), 90, "sm_90a"),
        # arithmetic and conversion
        (r"\b(fma|max|min|neg|abs)\.[\w.]*bf16(x2)?\b", (7, 0), 80),
        (r"\b(add|sub|mul|ex2|tanh)\.[\w.]*bf16(x2)?\b", (7, 8), 90),
        (r"\b(max|min)\.[\w.]*f16(x2)?\b", (7, 0), 80),
        (r"\b(max|min)\.[\w.]*NaN\b", (7, 0), 80),
        (r"\b(max|min)\.[\w.]*xorsign\.abs\.f32\b", (7, 2), 86),
        (r"\b(max|min)\.[\w.]*f32 +[^,;]+,[^,;]+,[^,;]+,", (8, 8), 100),
        (r"\b(add|sub|mul|fma)\.[\w.]*f32x2\b", (8, 6), 100),
        (r"\bfma\.[\w.]*relu\b", (7, 0), 80),
        (r"\bcvt\.[\w.]*relu\b", (7, 0), 80),
        (r"\bcvt\.[\w.]*f16x2\b", (7, 0), 80),
        (r"\bcvt\.[\w.]*bf16\.f32\b", (7, 0), 80),
        (r"\bcvt\.[\w.]*f32\.bf16\b", (7, 1), 80),
        (r"\bcvt\.rna\.tf32\b", (7, 0), 80),
        (r"\bcvt\.r[nz]\.[\w.]*tf32\b", (7, 8), 90),
        (r"\bcvt\.[\w.]*\b(e4m3|e5m2)x2\b", (8, 1), 89),  # 7.8 would do on sm_90
        (r"\bcvt\.pack\b", (6, 5), 75),
        (r"\btanh\.approx\b", (7, 0), 75),
        (r"\bex2\.approx\.(ftz\.)?f16", (7, 0), 75),
        (r"\bredux\.sync\b", (7, 0), 80),
        (r"\b(bmsk|szext)\b", (7, 6), 75),
        # caches and wide accesses
        (r"\bL1::(evict|no_allocate)", (7, 4), 75),
        (r"\bL2::(64|128)B\b", (7, 4), 75),
        (r"\bL2::256B\b", (7, 4), 80),
        (r"\bL2::(evict_|cache_hint)", (7, 4), 80),
        (r"\b(createpolicy|applypriority|discard)\b", (7, 4), 80),
        (r"\b(ld|st)\.global[\w.:]*\.(v8\.[bfsu]32|v4\.[bfsu]64)\b", (8, 8), 100),
        (r"\bred\.global\.[\w.]*\.v[248]\b", (8, 1), 90),
        (r"\bmultimem\.", (8, 1), 90),
        (r"\.b128\b", (8, 3), 75),
    )
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Register names carry no information, except the special ones in FEATURES.
_NAMES = re.compile(r"%(?!n?cluster|is_explicit_cluster)\w+")
# Separates an opcode from the operands, in patterns that match both.
_OPERANDS = " +"


@functools.lru_cache(maxsize=1 << 14)  # few opcodes make many texts
def _features_of(word: str) -> tuple[int, ...]:
    """Indices in FEATURES of the features in a word of PTX text, as far as the word alone shows."""
    code = _NAMES.sub("0", word)
    return tuple(
        i
        for i, feature in enumerate(FEATURES)
        if re.search(feature.pattern.pattern.partition(_OPERANDS)[0], code)
    )


def _features_in(code: str) -> Iterator[tuple[Feature, str]]:
    """The features of a text without comments, in the order of FEATURES, with the text of each."""
    words: dict[int, list[str]] = {}
    for word in dict.fromkeys(code.split()):
        if "." in word or "cluster" in word:  # all features do, and registers rarely
            for i in _features_of(word):
                words.setdefault(i, []).append(word)
    for i in sorted(words):
        feature, texts = FEATURES[i], words[i]
        if _OPERANDS in feature.pattern.pattern:
            followed = [(word, rest) for word in texts for rest in code.split(word)[1:]]
            texts = [f"{word}{rest.partition(';')[0]};" for word, rest in followed]
        if found := next(filter(None, map(feature.pattern.search, texts)), None):
            yield feature, " ".join(found[0].split())


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A PTX target: ``Target.parse("sm_90a")``; ``sm`` is 90."""

    name: str
    sm: int

    @staticmethod
    def parse(name: str) -> Target:
        """The target called ``name``; raises SettingError for an unknown one."""
        if name not in TARGETS:
            raise SettingError(f"unknown target {name!r}: one of {', '.join(TARGETS)}")
        return Target(name, number_of(name))

    @property
    def portable(self) -> str:
        """The target of the same architecture whose code newer ones run too."""
        return f"sm_{self.sm}"

    def version_for(self, body: str) -> Version:
        """The lowest PTX ISA version that supports this target and every instruction of ``body``.

        Comments do not count. Raises PtxgenError when an instruction needs another architecture.
        """
        version = FIRST_VERSION[self.name]
        for feature, text in _features_in(_COMMENT.sub("", body)):
            if needed := feature.reason_against(self):
                raise PtxgenError(f"{text} needs {needed}, the target is {self.name}")
            version = max(version, feature.version)
        return version
