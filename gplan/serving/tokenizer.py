"""The checkpoint's tokenizer and chat template, as transformers reads them. May be used from several threads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from gplan.errors import GplanError
from gplan.serving.grammar.library import GrammarError
from gplan.serving.grammar.tool_syntax import ToolSyntax, read_syntax
from gplan.serving.vocabulary import Vocabulary

_CHARACTERS_PER_TOKEN = 4

_HIDDEN_BY_A_CUT = 64
"""A text cut in the middle of a word may have more tokens there than the whole has: a generous bound of how many."""


class TemplateRefusalError(Exception):
    """The chat template cannot be applied to these messages or arguments; says why.

    Attributes:
        param: what is refused.
    """

    def __init__(self, why: str, param: str = "messages") -> None:
        super().__init__(why)
        self.param = param


class TooManyTokensError(Exception):
    """A text has more tokens than were allowed; says how many at least."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class ServedTokenizer:
    """Text to tokens and back.

    Raises:
        GplanError: the checkpoint has no tokenizer that can be used, or a chat template that cannot be read.
    """

    def __init__(self, folder: str) -> None:
        from gplan.models.tokenizer_files import read_tokenizer

        self._tokenizer = read_tokenizer(folder)
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GplanError(f"{folder}: the tokenizer has no tokenizer.json", "Convert it with transformers.")
        self._backend = backend
        # A tokenizer.json may say to cut or fill texts; a prompt is never changed.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocabulary = Vocabulary(self._backend)
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self._own_arguments = frozenset(own) | {"messages", "self"}
        self._check_template(folder)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_at_most(self, text: str, limit: int, *, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, of a text that may be much too long: its beginning is looked at first, then twice as much, so a
        text that is too long costs no more than a few times one that is not.

        Raises:
            TooManyTokensError: there are more than `limit` tokens, and more than the end of a beginning can hide.
        """
        length = max(1, limit) * _CHARACTERS_PER_TOKEN
        while length < len(text):
            count = len(self.encode(text[:length], add_special_tokens=add_special_tokens))
            if count > limit + _HIDDEN_BY_A_CUT:
                raise TooManyTokensError(count - _HIDDEN_BY_A_CUT)
            length *= 2
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The batch call lets other threads run meanwhile; that of one text does not.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def offsets(self, text: str) -> list[int]:
        """Of each token of `encode(text)`: the characters of the text before it."""
        encoding = self._backend.encode(text)
        starts, last = [], 0
        for start, end in encoding.offsets:
            last = max(last, start) if (start, end) != (0, 0) else last
            starts.append(last)
        return starts

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_arguments: Mapping[str, Any],
        limit: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Tokens of a conversation, `limit` of them at most.

        Args:
            tools: as the API describes them.
            template_arguments: variables for the template; none of transformers' own arguments.

        Raises:
            TemplateRefusalError: the template refuses the messages, or an argument is not the template's.
            TooManyTokensError: as `encode_at_most`.
        """
        for name in template_arguments:
            if name in self._own_arguments:
                why = f"chat_template_kwargs: {name} cannot be set by a request"
                raise TemplateRefusalError(why, "chat_template_kwargs")
        text = self.render_chat(messages, add_generation_prompt, tools, template_arguments)
        return self.encode_at_most(text, limit, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation.

        Raises:
            TemplateRefusalError: the template refuses the messages or an argument.
        """
        from jinja2.exceptions import TemplateError

        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = list(tools)
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), **options, **(template_arguments or {})))
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise TemplateRefusalError(f"the chat template refuses this: {error}") from error

    @cached_property
    def tool_syntax(self) -> ToolSyntax:
        """How the model writes calls of tools.

        Raises:
            GrammarError: its chat template knows no tools, or writes calls in a form that is not understood.
        """
        user = [{"role": "user", "content": "?"}]
        probe = {"type": "function", "function": {"name": "probe", "description": "-", "parameters": {}}}
        try:
            if self.render_chat(user, True, [probe]) == self.render_chat(user, True):
                raise GrammarError("the model's chat template knows no tools", "Describe them in a message.")
            return read_syntax(self.render_chat, self._backend_special_tokens())
        except TemplateRefusalError as error:
            raise GrammarError(f"tools: {error}", "Describe them in a message.") from error

    def _backend_special_tokens(self) -> list[str]:
        return [entry.content for entry in self._backend.get_added_tokens_decoder().values() if entry.special]

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
