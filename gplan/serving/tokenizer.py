"""The checkpoint's tokenizer and chat template, as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gplan.errors import GplanError
from gplan.serving.vocabulary import Vocabulary


class ServedTokenizer:
    """Text to tokens and back.

    Raises:
        GplanError: the checkpoint has no tokenizer that can be used.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GplanError(
                f"{folder}: no usable tokenizer: {error}", "Put tokenizer.json and tokenizer_config.json beside it."
            ) from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GplanError(f"{folder}: the tokenizer has no tokenizer.json", "Convert it with transformers.")
        self.vocabulary = Vocabulary(backend)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation.

        Raises:
            ValueError: the template refuses the messages; with what it says.
        """
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(template_arguments or {}),
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this: {error}") from error
        return self.encode(str(text), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)
