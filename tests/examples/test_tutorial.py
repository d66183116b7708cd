"""`docs/tutorial.md` on a tiny model, as `make tutorial` runs it."""

import re
from pathlib import Path

import pytest

from ..processes import run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"


def without_numbers(text: str) -> list[str]:
    """The lines; numbers, which differ between machines, and the spaces before them are left out."""
    return [re.sub(r"\s*[\d.,:e+-]*\d", " #", line).strip() for line in text.splitlines() if line.strip()]


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print(tmp_path):
    done = run(ROOT / "examples" / "tutorial.py", "--output", "made", cwd=tmp_path)
    shown = re.findall(r"^```sh\n((?:[^`].*\n)*)```\n\n```text\n((?:[^`].*\n)*)```$", PAGE.read_text(), re.MULTILINE)
    assert len(shown) == 9
    expected = "".join(f"$ {command}{output}" for command, output in shown)
    assert without_numbers(done.stdout) == without_numbers(expected), "run: python examples/tutorial.py --write"
    answers = [output for command, output in shown if "liger-models generate" in command]
    assert answers == [
        "It is Paris.\n",
        "Ahoy! Paris it be, matey.\n",
        "Ahoy! Oslo it be, matey.\n",
        "It is orange.\n",
        "Ahoy! orange it be, matey.\n",
    ]
