"""The checkpoint's tokenizer and chat template, as transformers reads them. May be used from several threads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from gplan.errors import GplanError
from gplan.serving.vocabulary import Vocabulary


class TemplateRefusalError(Exception):
    """The chat template cannot be applied to these messages or arguments; says why."""


class ServedTokenizer:
    """Text to tokens and back.

    Raises:
        GplanError: the checkpoint has no tokenizer that can be used, or a chat template that cannot be read.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of a broken file, the tokenizers library raises nothing more exact
            why = str(error).strip().partition("\n")[0]
            raise GplanError(
                f"{folder}: no usable tokenizer: {type(error).__name__}: {why}",
                "Put tokenizer.json and tokenizer_config.json beside it.",
            ) from error
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GplanError(f"{folder}: the tokenizer has no tokenizer.json", "Convert it with transformers.")
        self._backend = backend
        # A tokenizer.json may say to cut or fill texts; a prompt is never changed.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocabulary = Vocabulary(self._backend)
        self._own_arguments = frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters) | {
            "messages"
        }
        self._check_template(folder)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The batch call lets other threads run meanwhile; that of one text does not.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_arguments: Mapping[str, Any],
    ) -> list[int]:
        """Tokens of a conversation.

        Args:
            template_arguments: variables for the template; none of transformers' own arguments.

        Raises:
            TemplateRefusalError: the template refuses the messages, or an argument is not the template's.
        """
        from jinja2.exceptions import TemplateError

        for name in template_arguments:
            if name in self._own_arguments:
                raise TemplateRefusalError(f"chat_template_kwargs: {name} cannot be set by a request")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **template_arguments
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise TemplateRefusalError(f"the chat template refuses this: {error}") from error
        return self.encode(str(text), add_special_tokens=False)

    def _check_template(self, folder: str) -> None:
        """A template may refuse a conversation; one that no conversation can be put into is broken."""
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        if not self.has_chat_template:
            return
        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        except TemplateSyntaxError as error:
            raise GplanError(
                f"{folder}: the chat template is broken in line {error.lineno}: {error.message}",
                "Get chat_template.jinja or tokenizer_config.json again.",
            ) from error
        except (TemplateError, TypeError, ValueError):
            return

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)
