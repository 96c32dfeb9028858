"""Configuration of a model: the description of its architecture, checked against the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.check import check_tensors
from urdir.model.families.description import Description, fields_of
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.summary import summary
from urdir.model.files.model_file import ModelFile

#: Files that are no language model, by general.type.
OTHER_KINDS = {
    "adapter": "a LoRA adapter: open its model, with this as an adapter",
    "imatrix": "an importance matrix: urdir does not quantise files",
    "mmproj": "a multi-modal projector (mmproj): only text models run",
}


#: Keys of folders that a family need not read: sizes of layers or heads that no layer has.
_UNREAD = ("feed_forward_length", "rope.dimension_count", "rope.freq_base", "expert_group_count")


def _check_read(description: Description) -> None:
    """Raise UnsupportedError if a folder says what its family cannot take into account."""
    of = description.architecture
    unread = {key.removeprefix(f"{of}.") for key in description.ignored_keys}.difference(_UNREAD)
    if unread:
        raise UnsupportedError(f"'{of}' models cannot have {', '.join(sorted(unread))}")


@dataclass(frozen=True, slots=True, repr=False)
class Config(Description):
    """The `Description` of a model whose tensors were checked against it; see `of`. Its text
    lists the layers and their parts."""

    def __str__(self) -> str:
        return summary(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the text in a notebook."""
        printer.text(str(self))

    @classmethod
    def of(cls, gguf: ModelFile, *, nextn: bool = False) -> Self:
        """Read the metadata and check all tensors; needs no tokeniser. With ``nextn`` the
        description has the MTP heads of the file.

        Raises UnsupportedError (architecture, tensor types, tensors that would have to be ignored)
        or ConfigError (a key or tensor missing or inconsistent), naming the key or tensor.
        """
        if (kind := str(gguf.metadata.get("general.type"))) in OTHER_KINDS:
            raise UnsupportedError(f"{gguf.path}: {OTHER_KINDS[kind]}")
        try:
            found = describe(reader := Reader.of(gguf, nextn=nextn))
            if reader.of_folder:
                _check_read(found)
            check_tensors(found, gguf)
        except (ConfigError, UnsupportedError) as error:
            prefix = f"{gguf.path}: "
            if str(error).startswith(prefix):
                raise
            raise type(error)(prefix + str(error)) from None
        return cls(**fields_of(found))
