"""Models in huggingface_hub's cache on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from urdir.model.files.hub import (
    PREFIX,
    FoundModel,
    cached_repositories,
    part_names_in,
    whole_models,
)


def cached_models() -> list[FoundModel]:
    """All GGUF models and safetensors folders in the cache, by name. Empty without huggingface_hub
    or a cache."""
    try:
        repositories = cached_repositories()
    except ImportError:
        return []
    found: dict[str, FoundModel] = {}
    for repo in repositories:
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified):
            root = revision.snapshot_path
            sizes = {
                f.file_path.relative_to(root).as_posix(): f.size_on_disk for f in revision.files
            }
            for model in _models(repo.repo_id, root, sizes, revision.last_modified):
                found[model.name] = model
    return sorted(found.values(), key=lambda model: model.name)


def _models(repo: str, root: Path, sizes: dict[str, int], modified: float) -> Iterator[FoundModel]:
    """Models of one commit; ``sizes`` has its cached files."""
    for first in whole_models(sizes):
        parts = part_names_in(first)
        if all(part in sizes for part in parts):
            nbytes = sum(sizes[part] for part in parts)
            yield FoundModel(f"{PREFIX}{repo}:{first}", root / first, nbytes, modified)
    weights = [size for name, size in sizes.items() if name.endswith(".safetensors")]
    if weights and "config.json" in sizes:
        yield FoundModel(f"{PREFIX}{repo}", root, sum(weights), modified)
