"""Text to token ids and back, and the chat template: the checkpoint's own tokenizer, through transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.errors import CheckpointError, RequestError

_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")

Message = Mapping[str, str]


class Tokenizer:
    """A checkpoint's tokenizer. `tokenizer` is the object transformers made of it."""

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self._directory = directory
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, directory: Path) -> Tokenizer:
        """Reads the tokenizer beside the weights; no code from the checkpoint is run.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        if not cls.present(directory):
            raise CheckpointError(
                f"tokenizer in {directory}",
                found="none",
                expected=f"one of {', '.join(_FILES)}",
                hint="copy the tokenizer files of the original model there, or give prompts as token ids",
            )
        from transformers import AutoTokenizer

        try:
            return cls(directory, AutoTokenizer.from_pretrained(directory, local_files_only=True))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(
                f"tokenizer in {directory}",
                found=f"{type(error).__name__}: {error}",
                expected="files that transformers can read",
                hint="copy the tokenizer files of the original model there again",
            ) from error

    @staticmethod
    def present(directory: Path) -> bool:
        """Whether the checkpoint has tokenizer files."""
        return any((directory / name).is_file() for name in _FILES)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation is written."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens the tokenizer puts around one."""
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out, nothing tidied up."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation in the checkpoint's chat template, up to where the assistant answers.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.

        Raises:
            CheckpointError: there is no chat template.
            RequestError: the template does not accept these messages.
        """
        if not self.has_chat_template:
            raise CheckpointError(
                f"chat template in {self._directory}",
                found="none",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                hint="copy it from the model's instruct version, or complete plain text with `muster run`",
            )
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestError(
                "messages", found=str(error), expected="messages that the checkpoint's chat template accepts"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))
