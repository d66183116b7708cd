"""Conversations whose messages have images and videos in them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_models.tokenizer import Tokenizer


def _batch(conversations: Sequence[Any]) -> Sequence[Any]:
    return [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations


def image_parts(conversations: Sequence[Any]) -> list[Mapping[str, Any]]:
    """All parts of the messages' contents, in order; of one conversation or of several."""
    return [
        part
        for messages in _batch(conversations)
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    ]


def rendered(tokenizer: "Tokenizer", conversations: Sequence[Any], **variables: Any) -> list[str]:
    """Each conversation as the chat template writes it."""
    return [
        str(tokenizer.apply_chat_template(messages, tokenize=False, **variables)) for messages in _batch(conversations)
    ]
