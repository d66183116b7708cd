"""Text of strangers, such as names in a checkpoint or what a model has written, on a terminal."""

import re
import sys
import warnings

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except for newline and tab, and surrogates, which can't be encoded."""


def printable(text: str) -> str:
    r"""``text`` with control characters shown as escapes, such as ``\x1b``. Newlines and tabs are kept.

    A terminal obeys control characters: they move the cursor, change the window's title, or write to the clipboard.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def show_warnings_as_lines() -> None:
    """Print each warning of this process in one line, printable, without the place in the source."""
    warnings.showwarning = lambda message, *_, **__: print(printable(f"warning: {message}"), file=sys.stderr)
