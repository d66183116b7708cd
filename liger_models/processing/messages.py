"""Conversations whose messages have images and videos in them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from liger_models.kernels.dispatch import check

if TYPE_CHECKING:
    from liger_models.tokenizer import Tokenizer


RESIZING = frozenset({"min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "nframes"})
"""What qwen_vl_utils reads in a part, beside the image or the video."""


def _batch(conversations: Sequence[Any]) -> Sequence[Any]:
    return [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations


def image_parts(conversations: Sequence[Any], *, videos: bool = False) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """What is to be seen in the messages, in order, of one conversation or of several.

    Args:
        conversations: messages, or a list of lists of them.
        videos: whether the model takes them.

    Returns:
        "image" or "video", what it is, and the whole part, of each.

    Raises:
        ValueError: content that is neither a text nor a list, a part of another type, or without what its type says.
    """
    contents = [message.get("content") for messages in _batch(conversations) for message in messages]
    for content in contents:
        check(
            content is None or isinstance(content, str | list | tuple),
            f"apply_chat_template: a message's content must be a text or a list of parts, got "
            f"{type(content).__name__}.",
        )
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    names = {"image": ("image", "path", "url")} | ({"video": ("video",)} if videos else {})
    found: list[tuple[str, Any, Mapping[str, Any]]] = []
    for part in parts:
        # Data sets with one scheme for all parts have None in those of other types.
        keys = {key for key, value in part.items() if value is not None} if isinstance(part, Mapping) else set()
        kind: Any = next((name for name in ("text", *names) if name in keys), None) if keys else part
        kind = part["type"] if "type" in keys else kind
        if kind == "text" or (kind not in names and "text" in keys):
            continue
        check(
            kind in names,
            f"apply_chat_template: a part of a message must be of type text or {' or '.join(names)}, got {kind!r}.",
        )
        unread = sorted(keys & RESIZING)
        check(
            not unread,
            f"apply_chat_template: a part of type {kind} must not have a size of its own, got {', '.join(unread)}. "
            "Resize it, or set the processor's bounds: processor.images.max_pixels = ...",
        )
        given = [part[name] for name in names[kind] if name in keys]
        check(
            bool(given),
            f"apply_chat_template: a part of type {kind} must have it beside, under {' or '.join(names[kind])}, got "
            f"{sorted(keys)}. Or render the texts by the tokenizer's apply_chat_template, and call the processor.",
        )
        found.append((kind, given[0], part))
    return found


def rendered(tokenizer: "Tokenizer", conversations: Sequence[Any], **variables: Any) -> list[str]:
    """Each conversation as the chat template writes it."""
    return [
        str(tokenizer.apply_chat_template(messages, tokenize=False, **variables)) for messages in _batch(conversations)
    ]
