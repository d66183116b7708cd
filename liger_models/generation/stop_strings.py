"""Detection of strings that end a row, such as the beginning of the next question."""

from collections.abc import Sequence
from typing import Any

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The replacement character, which decoders write in place of an incomplete character.

Some decoders also write it in place of all bytes after an incomplete character.
"""
MOST_BYTES = 4
"""Maximum number of bytes that a character has in UTF-8."""


class StopStrings:
    """Detects whether the last token of a row completes one of the strings.

    Args:
        strings: the strings. They must not be empty.
        tokenizer: a tokenizer with a method ``decode(ids, skip_special_tokens=False)``.

    Attributes:
        window: number of tokens at the end of a row that are decoded. Since each token has at least one byte, a
            string of n bytes has at most n tokens. The window has a few more tokens, because decoders strip a leading
            space and because the first token may begin inside a character.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        if not all(isinstance(string, str) and string for string in strings):
            raise ValueError(
                f"generate: stop_strings must be a text or a list of texts, none of them empty, got {strings!r}."
            )
        if tokenizer is None:
            raise ValueError(
                "generate: stop_strings need a tokenizer, got a model without one. Pass "
                "tokenizer=Tokenizer.from_pretrained(folder)."
            )
        self.strings, self.tokenizer = strings, tokenizer
        self.window = max(len(string.encode()) for string in strings) + 1 + (MOST_BYTES - 1)

    def completed_by_last(self, row: list[int]) -> bool:
        """Return whether a string ends inside or at the end of the last token.

        Args:
            row: the last ``window`` tokens of the row, with −1 for padding.
        """
        tokens = [token for token in row if token >= 0]
        text = self._decode(tokens)

        # If the text begins inside a character, drop leading tokens. Their number is chosen so that the fewest broken
        # characters remain.
        if text.startswith(BROKEN):
            # At most three bytes of the first character are missing.
            spare = max(len(tokens) - self.window + MOST_BYTES - 1, 0)
            tokens = min((tokens[first:] for first in range(spare + 1)), key=lambda x: self._decode(x).count(BROKEN))
            text = self._decode(tokens)

        # The string must end beyond the text of all tokens except the last.
        before = self._decode(tokens[:-1]).rstrip(BROKEN)
        return any(text.find(string, max(len(before) - len(string) + 1, 0)) >= 0 for string in self.strings)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text
