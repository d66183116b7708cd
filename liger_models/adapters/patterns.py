"""Safe matching of regular expressions from an adapter_config.json, which may come from an untrusted author.

`re` tries all ways in which a pattern can match a text, one after the other. For a pattern such as ``(a+)+b``, each
further character of the text doubles the number of these ways, and the search cannot be interrupted. `Pattern` follows
all ways at once: from the set of positions where a part of the pattern may begin, it computes the set of positions
where the part may end. A pattern has the same meaning as in `re`, because `re` parses it and compiles its smallest
parts.

Source: https://swtch.com/~rsc/regexp/regexp1.html.
"""

import importlib
import re
import sys
from typing import Any

_PARSER, _COMPILER = (
    importlib.import_module(name)
    for name in (("re._parser", "re._compiler") if sys.version_info >= (3, 11) else ("sre_parse", "sre_compile"))
)

WORK = 10_000_000
"""Maximum number of positions that are visited for one pattern. Matching a layer's name visits about n · p positions,
where the name has n characters and the pattern has p parts."""


class Pattern:
    """A regular expression. Back references, conditions, atomic groups and possessive quantifiers are not supported.

    Args:
        pattern: the expression, in the syntax of `re`.

    Raises:
        ValueError: ``pattern`` is not a regular expression.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._tree = _PARSER.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"must be a regular expression, got {pattern!r}: {error}. Correct it.") from error
        self._pattern, self._work = pattern, 0
        self._leaves: dict[tuple[int, int, int], Any] = {}

    def fullmatch(self, text: str) -> bool:
        """Whether the expression matches the whole text.

        Raises:
            ValueError: the expression has parts that are not supported, or matching takes too many steps.
        """
        return len(text) in self._ends(self._tree, text, {0}, self._tree.state.flags)

    def _ends(self, parts: Any, text: str, positions: set[int], flags: int) -> set[int]:
        """Return all positions where a sequence of parts may end if it begins at one of ``positions``."""
        for index, (operator, argument) in enumerate(parts):
            self._work += len(positions)
            if self._work > WORK:
                raise ValueError(
                    f"must be matched in at most {WORK:,} steps, got {self._pattern!r}, which takes more. Simplify it, "
                    "or list the names of the layers."
                )
            name = operator.name
            if name == "SUBPATTERN":
                _, added, removed, inner = argument
                positions = self._ends(inner, text, positions, (flags | added) & ~removed)
            elif name == "BRANCH":
                positions = set().union(*(self._ends(inner, text, positions, flags) for inner in argument[1]))
            elif name in ("MAX_REPEAT", "MIN_REPEAT"):
                least, most, inner = argument
                positions = self._repeat(least, most, inner, text, positions, flags)
            elif name in ("ASSERT", "ASSERT_NOT"):
                ahead, inner = argument
                width = 0 if ahead == 1 else inner.getwidth()[0]  # a lookbehind has a fixed width
                matched = {
                    position
                    for position in positions
                    if position >= width
                    and (ends := self._ends(inner, text, {position - width}, flags))
                    and (ahead == 1 or position in ends)
                }
                positions = matched if name == "ASSERT" else positions - matched
            elif name in ("ANY", "AT", "FAILURE", "IN", "LITERAL", "NOT_LITERAL"):
                key = (id(parts), index, flags)
                if key not in self._leaves:
                    self._leaves[key] = _COMPILER.compile(parts[index : index + 1], flags)
                match = self._leaves[key].match
                positions = {found.end() for position in positions if (found := match(text, position))}
            else:
                raise ValueError(
                    "must have no back references, conditions, and atomic or possessive parts, got "
                    f"{self._pattern!r}. List the names of the layers."
                )
        return positions

    def _repeat(self, least: int, most: int, inner: Any, text: str, positions: set[int], flags: int) -> set[int]:
        """Return where ``least`` to ``most`` repetitions of ``inner`` may end if they begin at one of ``positions``."""
        for _ in range(least):
            following = self._ends(inner, text, positions, flags)
            if following == positions:  # further repetitions would not change the set
                break
            positions = following

        # Only positions that are reached for the first time can lead to new positions.
        reached = newest = positions
        for _ in range(most - least):
            newest = self._ends(inner, text, newest, flags) - reached
            if not newest:
                break
            reached = reached | newest
        return reached
