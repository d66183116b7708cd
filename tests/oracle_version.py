"""Skipping of tests of families that the installed transformers does not have yet. Skipped tests are counted.

Python 3.10 gets an older transformers than the newest one in constraints.txt, with which no test is skipped.
"""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
UNKNOWN = re.compile(r"Unrecognized model identifier: (\w+)")
LACKS = "has no {family} yet"


def newest_pinned() -> Version:
    """The newest version of transformers in constraints.txt."""
    return max(map(Version, re.findall(r"^transformers==([\d.]+)", CONSTRAINTS.read_text(), re.MULTILINE)))


def needs_newest(feature: str) -> pytest.MarkDecorator:
    """Skip a test against transformers unless it is the newest one in constraints.txt.

    Args:
        feature: what the older one lacks.
    """
    installed = version("transformers")
    reason = f"transformers {installed} {LACKS.format(family=feature)}"
    return pytest.mark.skipif(Version(installed) < newest_pinned(), reason=reason)


def skip_an_unknown_family(error: ValueError, installed: str | None = None) -> None:
    """Skip a test that failed because the installed transformers is older than the family.

    Args:
        error: the error that transformers has raised.
        installed: version of transformers. Default: the installed version.
    """
    unknown = UNKNOWN.search(str(error))
    installed = installed or version("transformers")
    if unknown and Version(installed) < newest_pinned():
        pytest.skip(f"transformers {installed} {LACKS.format(family=unknown[1])}")


def count_of_skipped(reasons: list[str]) -> int:
    """The number of skips whose reason comes from `skip_an_unknown_family`."""
    return sum(bool(re.search(LACKS.format(family=".+"), reason)) for reason in reasons)
