"""Prints untrusted text, such as names from a checkpoint or text that a model has generated, on a terminal."""

import re
import sys
import warnings

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Matches surrogates, which cannot be encoded, and all control characters except newline and tab."""


def printable(text: str) -> str:
    r"""Return ``text`` with control characters replaced by escapes such as ``\x1b``. Newlines and tabs are kept.

    A terminal executes control characters, which can move the cursor, change the window's title, or write to the
    clipboard.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def show_warnings_as_lines() -> None:
    """Make this process pass each later warning through `printable`, and print it as one line.

    The file and the line number are left out.
    """
    warnings.showwarning = lambda message, *_, **__: print(printable(f"warning: {message}"), file=sys.stderr)
