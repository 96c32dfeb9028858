"""The error base of the model package: one line that says what failed, on what, and what to do."""

from __future__ import annotations


class ModelError(Exception):
    """A model file, a prompt or a setting cannot be used as asked."""


class GgufError(ModelError):
    """The file cannot be read, or is not a well-formed GGUF file of a version we know."""


class SafetensorsError(ModelError):
    """A folder with *.safetensors files is incomplete, or one of its files is not well formed."""


class HubError(ModelError):
    """A model on the Hugging Face hub cannot be found or downloaded."""


class HubNameError(HubError):
    """A name is not one of ``hf:org/repo[:file-or-type]`` (bad usage: exit code 2)."""


class ConfigError(ModelError):
    """A well-formed file describes no model: a key or tensor is missing, or two disagree."""


class UnsupportedError(ModelError):
    """The file is good, but asks for something that this version does not do."""


class NoRoomError(ModelError):
    """The device has too little free memory."""


class TokenizerError(ModelError):
    """The file's vocabulary is missing, or cannot be built or used as asked."""


class TemplateError(ModelError):
    """The chat template is missing, does not compile, fails, or exceeds its limits."""


class NoTemplateError(TemplateError):
    """The file has no chat template, and none is known to fit it."""


class LongConversationError(TemplateError):
    """A conversation has more characters than go through a chat template."""


class ConstraintError(ModelError):
    """A grammar, schema or expression is malformed, too large, or allows no text."""


class PrefixFileError(ModelError):
    """A prefix cannot be saved or restored as asked: slot, name or file does not fit."""


class ContextFullError(ModelError):
    """The context has no room for the tokens; the sequence is as it was before the call."""


class SettingsError(ModelError):
    """A setting the user gave is out of range (bad usage: exit code 2)."""


class BusyError(ModelError):
    """Too many requests are waiting, or this one waited too long: try again after ``retry_after``
    seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
