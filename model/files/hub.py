"""Hugging Face hub: models by name, through the huggingface_hub package (extra "hub").

        hf:org/repo             the Q4_K_M of a repository with GGUF files, or its only one;
                                the folder of a repository with only safetensors
    hf:org/repo:Q8_0        the GGUF file of that type
    hf:org/repo:a/b.gguf    that file

Downloads resume and use that package's own cache; it reads its own environment variables (HF_HOME,
HF_TOKEN, HF_ENDPOINT). Cached models need no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from urdir.model.errors import HubError, HubNameError
from urdir.model.files.pretrained.tokens import VOCABULARIES, read_json
from urdir.model.files.safetensors import INDEX_NAME
from urdir.model.files.split import part_names

PREFIX = "hf:"
DEFAULT_QUANT = "Q4_K_M"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
#: Files of a folder besides *.safetensors and the vocabulary; the files of modules that
#: sentence-transformers runs after a model.
_TEXT_FILES = (
    *("config.json", "generation_config.json", "hf_quant_config.json"),
    *("tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
)
_MODULE_FILE = re.compile(r"\d_(Pooling/config\.json|Dense/(config\.json|model\.safetensors))")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model name: the text after "hf:"."""

    repo: str
    wanted: str | None  # a file, or a type such as Q4_K_M

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Parse "org/repo[:file-or-type]"; HubNameError if malformed."""
        repo, colon, wanted = text.partition(":")
        if not _REPO.fullmatch(repo) or bool(colon) != bool(wanted):
            raise HubNameError(
                f"'{PREFIX}{text}' is not a name such as hf:org/repo or hf:org/repo:Q4_K_M"
            )
        return cls(repo, wanted or None)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on this machine: its ``name`` (in a cache the one that opens it, in a folder that for
    clients: without .gguf, of a split file without the numbers), the path of its (first) file or
    folder, its size in bytes and its last change in seconds since 1970."""

    name: str
    path: Path
    nbytes: int
    modified: float


def download(name: HubName) -> Path:
    """Download the model called ``name``, or find it in the cache.

    Returns the path of a GGUF file, with other parts beside it, or of a folder. Raises HubError.
    """
    repository = _Repository(name.repo)
    ggufs = whole_models(repository.files)
    if not ggufs and name.wanted is None and {"config.json"} <= set(repository.files):
        return _download_folder(repository)
    paths = [repository.download(file) for file in part_names_in(choose(name, ggufs))]
    return paths[0]


def choose(name: HubName, ggufs: Iterable[str]) -> str:
    """The GGUF file called ``name``, of several parts the first; HubError if none or several match.

    ``ggufs`` are the repository's, each split model by its first part.
    """
    files = list(ggufs)
    if not files:
        raise HubError(f"{PREFIX}{name.repo}: no GGUF file in this repository")
    if name.wanted is None:
        found = _of_type(files, DEFAULT_QUANT) or files
        if len(found) == 1:
            return found[0]
        raise HubError(f"{PREFIX}{name.repo}: {_which(found)}: add one as ':NAME'")
    if name.wanted.endswith(".gguf"):
        for file in files:
            if name.wanted in part_names_in(file):
                return file
        found = []
    else:
        found = _of_type(files, name.wanted)
    if len(found) == 1:
        return found[0]
    if found:
        raise HubError(f"{PREFIX}{name.repo}:{name.wanted}: {_which(found)}: name the file")
    raise HubError(f"{PREFIX}{name.repo}: no '{name.wanted}' in this repository; {_which(files)}")


def part_names_in(file: str) -> list[str]:
    """All parts of a model, given one of them, in the same folder of a repository."""
    path = PurePosixPath(file)
    return [str(path.with_name(part)) for part in part_names(path.name)]


def whole_models(files: Iterable[str]) -> list[str]:
    """The GGUF files that are models, each split one by its first part."""
    names = (file for file in files if file.endswith(".gguf"))
    others = ("mmproj", "imatrix")  # image projectors; quantiser statistics
    models = (n for n in names if not any(word in PurePosixPath(n).name for word in others))
    return sorted({part_names_in(model)[0] for model in models})


def _of_type(files: Iterable[str], quant: str) -> list[str]:
    """Files with the type between separators in their name, or in the folder's."""
    pattern = re.compile(rf"(?:^|[-./]){re.escape(quant)}(?:[-./]|$)", re.IGNORECASE)
    return [file for file in files if pattern.search(_PART.sub("", file))]


def _which(files: list[str]) -> str:
    shown = ", ".join(files[:30]) + (", ..." if len(files) > 30 else "")
    return f"there is {shown}" if len(files) == 1 else f"there are {shown}"


def _download_folder(repository: _Repository) -> Path:
    """Download what `SafetensorsModel` reads: config.json, the text files, the vocabulary, and the
    safetensors of the model."""
    if "model.safetensors" in repository.files:
        weights = ["model.safetensors"]
    elif INDEX_NAME in repository.files:
        weight_map = read_json(repository.download(INDEX_NAME)).get("weight_map")
        named = list(weight_map.values()) if isinstance(weight_map, dict) else []
        weights = sorted(file for file in repository.files if file in named)
    else:
        weights = [file for file in repository.files if re.fullmatch(r"[^/]+\.safetensors", file)]
    if not weights:
        raise HubError(
            f"{PREFIX}{repository.name}: neither GGUF nor safetensors files in this repository"
        )
    vocabulary = [name for name in VOCABULARIES if name in repository.files][:1]
    texts = [file for file in _TEXT_FILES if file in repository.files]
    modules = [file for file in repository.files if _MODULE_FILE.fullmatch(file)]
    for file in (*texts, *vocabulary, *modules, *weights):
        path = repository.download(file)
    return path.parent


def cached_repositories() -> Collection[Any]:
    """The repositories in the cache of huggingface_hub (its CachedRepoInfo), which must be
    installed; none without a cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return list(scan_cache_dir(constants.HF_HUB_CACHE).repos)
    except (CacheNotFound, ValueError):  # ValueError: it is a file
        return ()


class _Repository:
    """The files of a repository at one commit."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._offline = False
        try:
            import huggingface_hub
            from huggingface_hub import errors
        except ImportError:
            raise HubError(
                f"{PREFIX}{name} needs the package huggingface_hub: pip install 'urdir[hub]'"
            ) from None
        self._hub, self._errors = huggingface_hub, errors
        try:
            info = self._ask(lambda: self._hub.HfApi().model_info(name))
            self._revision: str | None = info.sha
            files = [sibling.rfilename for sibling in info.siblings or ()]
        except _UnreachableError:
            self._offline = True
            self._revision, files = self._cached()
            if self._revision is None:
                raise
        self.files = [file for file in files if _stays_inside(file)]

    def download(self, file: str) -> Path:
        """Download a file; its path in the cache."""
        if file not in self.files:
            raise HubError(f"{PREFIX}{self.name}: no {file} in this repository")
        options = {"revision": self._revision, "local_files_only": self._offline}
        return Path(self._ask(lambda: self._hub.hf_hub_download(self.name, file, **options)))

    def _cached(self) -> tuple[str | None, list[str]]:
        """The most recently changed commit in the cache, and its files."""
        revisions = [
            revision
            for repo in cached_repositories()
            if (repo.repo_type, repo.repo_id) == ("model", self.name)
            for revision in repo.revisions
        ]
        if not revisions:
            return None, []
        last = max(revisions, key=lambda revision: revision.last_modified)
        root = last.snapshot_path
        return last.commit_hash, [f.file_path.relative_to(root).as_posix() for f in last.files]

    def _ask(self, call: Callable[[], _T]) -> _T:
        """Run ``call`` and translate its errors."""
        errors, name = self._errors, f"{PREFIX}{self.name}"
        try:
            return call()
        except errors.GatedRepoError:
            raise HubError(
                f"{name}: the repository is gated: accept its terms on "
                f"https://huggingface.co/{self.name}, then log in with 'hf auth login'"
            ) from None
        except errors.RepositoryNotFoundError:
            raise HubError(
                f"{name}: no such model repository, or it is private ('hf auth login' logs in)"
            ) from None
        except errors.HfHubHTTPError as error:
            raise HubError(f"{name}: {_first_line(error)}") from None
        except Exception as error:  # from the HTTP library, which differs between versions
            raise _UnreachableError(
                f"{name}: the hub cannot be reached ({_first_line(error)}); downloaded "
                "models can be used without network"
            ) from None


class _UnreachableError(HubError):
    """The server does not respond."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _stays_inside(file: str) -> bool:
    """Whether a name from the server stays within its own folder."""
    parts = file.split("/")
    return file.isprintable() and "\\" not in file and not {"", ".", ".."} & set(parts)
