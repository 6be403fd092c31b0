"""LangChain's ChatLlamaCpp over skippy: the second question evaluates only what is new.

    pip install langchain-community
    python examples/langchain_chat.py model.gguf

ChatLlamaCpp makes its model from `llama_cpp.Llama`, so it is given `skippy.Llama` by that name while it is made.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from langchain_community.chat_models import ChatLlamaCpp

import skippy


def main(model_path: str) -> None:
    with patch("llama_cpp.Llama", skippy.Llama):
        chat = ChatLlamaCpp(model_path=model_path, n_ctx=2048, temperature=0.0, max_tokens=24, verbose=False)
    messages = [("system", "You are a guide to the lighthouses of the north coast. Answer briefly. " * 8)]
    for question in ("Which one is the oldest?", "Can people climb it?"):
        messages.append(("human", question))
        answer = chat.invoke(messages)
        messages.append(("ai", answer.content))
        print(question, "->", answer.content)
        print("reused", chat.client.last_reuse.cached_tokens, "of", chat.client.last_reuse.prompt_tokens)
    chat.client.close()


if __name__ == "__main__":
    main(sys.argv[1])
