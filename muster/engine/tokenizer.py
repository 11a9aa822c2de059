"""Text to token ids and back, and the chat template: the checkpoint's own tokenizer, through transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from muster.errors import CheckpointError, RequestError

_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
"""How byte-level BPE writes bytes as characters: those that print as themselves, the others from 256 on."""

_GIVEN = frozenset(
    {"messages", "add_generation_prompt", "documents", "raise_exception", "strftime_now", "namespace", "range", "dict"}
    | {"bos_token", "eos_token", "unk_token", "pad_token", "cycler", "joiner", "lipsum"}
)
"""Names that the caller of a template gives, or Jinja has itself."""

Message = Mapping[str, Any]


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

    @cached_property
    def _special(self) -> Mapping[int, str]:
        added = self._tokenizer.added_tokens_decoder
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in repr(self._tokenizer.backend_tokenizer.decoder)

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        """Ids of a text, with the special tokens the tokenizer puts around one, or without them."""
        return list(self._tokenizer.encode(text, add_special_tokens=not bare))

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, keep: frozenset[str] = frozenset()
    ) -> str:
        """Text of ids, nothing tidied up; of special tokens those in `keep`, or all with `skip_special_tokens` off."""
        if keep and skip_special_tokens:
            ids = [token_id for token_id in ids if self._special.get(token_id, "") in {"", *keep}]
            skip_special_tokens = False
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: they mark, and are no part of the text."""
        return frozenset(self._special)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, as it is stored: a character may be spread over several tokens."""
        token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < len(self._tokenizer) else None
        if token is None:
            return b""
        if token_id in self._tokenizer.added_tokens_decoder:
            return str(token).encode()
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return str(token).replace("\u2581", " ").encode()

    @cached_property
    def chat_template(self) -> str:
        """How the checkpoint writes a conversation, as a Jinja template; empty when it does not say."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else (template or {}).get("default", "")

    @cached_property
    def chat_options(self) -> frozenset[str]:
        """Names that the chat template reads besides the messages."""
        from jinja2 import TemplateError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        try:
            tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(self.chat_template)
        except TemplateError:
            return frozenset()
        return frozenset(meta.find_undeclared_variables(tree)) - _GIVEN

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Ids of a conversation in the checkpoint's chat template, up to where the assistant answers.

        Args:
            messages: `{"role": ..., "content": ...}` each, oldest first.
            tools: functions that the model may call, as OpenAI describes them.
            options: of the template, by their names in `chat_options`.

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
        if tools and "tools" not in self.chat_options:
            raise RequestError("tools", expected="none: the checkpoint's chat template has no place for them")
        unknown = sorted(options.keys() - (self.chat_options - {"tools"}))
        if unknown:
            known = ", ".join(sorted(self.chat_options - {"tools"})) or "nothing: the chat template has no options"
            raise RequestError("chat_template_kwargs", found=", ".join(unknown), expected=known)
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **options
            )
        # A template is a program of the checkpoint's, and any message may be its undoing.
        except Exception as error:
            raise RequestError(
                "messages", found=str(error), expected="messages that the checkpoint's chat template accepts"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))
