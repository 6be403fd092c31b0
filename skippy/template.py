"""Messages to prompt text, with the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from skippy.errors import ModelError
from skippy.model import Model

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]

# No template has it in its own text, and none trims or rewrites it.
_MARK = "\u2402skippy\u2403"


class ChatTemplate:
    """The template of a loaded model, or the Jinja text `source` instead.  ModelError where there is neither."""

    def __init__(self, model: Model, source: str | None = None) -> None:
        source = model.chat_template if source is None else source
        if source is None:
            raise ModelError(
                f"{model.path!r} carries no chat template; give a chat_template, or use generate() with your own prompt"
            )
        self._bos = self._token_text(model, model.bos)
        eos = self._token_text(model, model.eos)
        self._open = Jinja2ChatFormatter(source, eos, self._bos, add_generation_prompt=True)

    @staticmethod
    def _token_text(model: Model, token: int) -> str:
        return model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    @staticmethod
    def _check(messages: Sequence[Message]) -> None:
        if not messages:
            raise ValueError("messages is empty, expected at least one message")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"messages[{i}] is {message!r}, expected a mapping with 'role' and 'content'")

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The prompt text for `messages`, open for the assistant's answer."""
        self._check(messages)
        return str(self._open(messages=list(messages), tools=list(tools) if tools else None).prompt)  # type: ignore[arg-type]

    def begins_with_bos(self, text: str) -> bool:
        """Whether the rendered text already begins with the BOS token's text."""
        return bool(self._bos) and text.startswith(self._bos)

    def continuation(self, messages: Sequence[Message], text: str) -> str:
        """What follows the last answer in `messages` when the user goes on with `text`, up to the next answer.

        The answer itself is not rendered: its tokens stay as they were generated.  ModelError where the template
        does not show earlier answers.
        """
        marked = [*messages[:-1], {**messages[-1], "content": _MARK}, {"role": "user", "content": text}]
        _, found, rest = self.render(marked).rpartition(_MARK)
        if not found:
            raise ModelError("the model's chat template does not show earlier answers, so a session cannot go on")
        return rest
