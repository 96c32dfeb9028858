"""The tokeniser and the chat template of a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile
    from urdir.model.text.chat import ChatTemplate
    from urdir.model.text.sandbox import TemplateProcess
    from urdir.model.text.tokenizer import Tokenizer


class Texts(Owner):
    """Tokeniser and template, built at first use: a file without a vocabulary can be measured.

    ``source`` replaces the file's template; ``process``, possibly started, renders it and is closed
    by the caller.
    """

    def __init__(
        self,
        file: ModelFile,
        read_tokenizer: Callable[[], Tokenizer],
        source: str | None = None,
        process: TemplateProcess | None = None,
    ) -> None:
        self.file = file
        self._read_tokenizer = read_tokenizer
        self._source = source
        self._process = process
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._owners = ExitStack()
        self.is_open = True
        #: general.name of the file, or its stem.
        self.name = file.metadata.optional("general.name", str, Path(file.path).stem)

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokeniser. Raises ModelError if it has none, or was closed before its use."""
        if self._tokenizer is None:
            self._check_open()
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises NoTemplateError without one, ModelError once it is closed."""
        self._check_open()
        if self._template is None:
            from urdir.model.text.chat import ChatTemplate, find_template

            source = self._source
            if source is None:
                source = find_template(self.file, lambda: self.tokenizer)
            opened = ChatTemplate(source, self.tokenizer, self._process)
            self._template = self._owners.enter_context(opened)
        return self._template

    def _check_open(self) -> None:
        """Raise ModelError once it is closed: the file has no metadata then, and would seem to have
        no template."""
        if not self.is_open:
            raise ModelError(f"the engine of {self.name} is closed")

    def close(self) -> None:
        """End the template's process. Idempotent."""
        self.is_open = False
        self._owners.close()


@contextmanager
def open_texts(
    path: str | os.PathLike[str] | None,
    quantize: str | None = None,
    chat_template: str | None = None,
) -> Iterator[Texts]:
    """The texts of a model that is not loaded here; see `EngineOptions`. Raises ModelError."""
    from urdir.model.engine.pieces import open_file
    from urdir.model.text.named_templates import template_text
    from urdir.model.text.tokenizer import Tokenizer

    source = None if chat_template is None else template_text(chat_template)
    with (
        open_file(path, quantize) as file,
        Texts(file, lambda: Tokenizer.of(file), source) as texts,
    ):
        yield texts
