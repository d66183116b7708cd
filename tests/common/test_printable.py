"""Text of strangers on a terminal."""

import sys
import unicodedata

from liger_models.common.printable import printable


def test_control_characters_are_shown():
    assert printable("a\x1b]0;title\x07b\r\x9bc\ud83dd") == r"a\x1b]0;title\x07b\r\x9bc\ud83dd"


def test_all_other_characters_are_kept():
    kept = [character for character in map(chr, range(sys.maxunicode + 1)) if printable(character) == character]
    changed = {*map(chr, range(sys.maxunicode + 1))} - {*kept}
    assert changed == {c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in ("Cc", "Cs")} - {
        *"\n\t"
    }
    assert all(printable(character).isprintable() for character in changed)
