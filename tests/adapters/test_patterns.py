"""Regular expressions whose matching always ends, against `re`."""

import random
import re

import pytest

from liger_models.adapters import patterns
from liger_models.adapters.patterns import Pattern

NAMES = [
    f"model.{tower}.layers.{layer}.{module}"
    for tower in ("language_model", "visual")
    for layer in (0, 7, 12)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
] + ["lm_head", "", "a\nb"]

PATTERNS = [
    r".*\.(q|gate)_proj",
    r"model\.language_model\.layers\.\d{1,2}\.(?:self_attn|mlp)\..*_proj",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|(?:\blm_head\b)",
    r"^(model\.language_model(?=\.).*\.(o_proj|gate_proj))$",
    r"^(?!.*visual).*(?:q_proj|down_proj).*",
    r".*(?<!gate)_proj",
    r".*(?<=o|q)_proj",
    r"(?i).*Q_PROJ",
    r"(?i:LM)_head",
    r"(?:\w+\.)*\w+",
    r"[^.]*\.(?:[a-z_]+\.|[0-9]+\.){3,4}[a-z]+[^l]proj",
    r".*layers\.(?:0|1[0-9]?)\..*",
    r"(?s:.*)",
    r".*",
    r"(?m)a$\n^b",
    r"|lm_head",
    r"(?:l?m?_?){2,}head",
    r"()*lm_head",
    r"(?x) lm _ head  # the head",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_names_as_re(pattern):
    ours = Pattern(pattern)
    wanted = [name for name in NAMES if re.fullmatch(pattern, name)]
    assert [name for name in NAMES if ours.fullmatch(name)] == wanted
    assert wanted


def test_random_patterns():
    draw = random.Random(0)

    def make(depth: int) -> str:
        if depth == 0:
            return draw.choice(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\b", "^", "$", ""])
        one, other = make(depth - 1), make(depth - 1)
        repeat = draw.choice(["*", "+", "?", "*?", "{2}", "{1,2}", "{0}"])
        return draw.choice([one + other, f"(?:{one}|{other})", f"(?:{one}){repeat}", f"(?={one}){other}", f"(?!{one})"])

    texts = ["".join(draw.choices("ab.", k=length)) for length in range(7) for _ in range(3)]
    for _ in range(300):
        pattern = make(draw.randint(1, 4))
        ours = Pattern(pattern)
        for text in texts:
            assert ours.fullmatch(text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(?:a|a|aa)*b", "(?:(?:a*)*)*b", "(?:a{0,9999}){9999}b", "(.*a){30}b"])
def test_patterns_for_which_re_does_not_return(pattern):
    assert not Pattern(pattern).fullmatch("a" * 80)


def test_too_much_work(monkeypatch):
    monkeypatch.setattr(patterns, "WORK", 100)
    with pytest.raises(ValueError, match=r"in at most 100 steps, got '\(a\+\)\+b', which takes more\. Simplify it"):
        Pattern("(a+)+b").fullmatch("a" * 80)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "must be a regular expression, got '\\(a'"),
        ("a{99999999999}", "must be a regular expression"),
        ("(" * 5000 + ")" * 5000, "must be a regular expression"),
        (r"(a)\1", "must have no back references"),
        (r"(a)?(?(1)b|c)", "must have no back references"),
    ],
)
def test_refused_patterns(pattern, message):
    with pytest.raises(ValueError, match=message):
        Pattern(pattern).fullmatch("aa")
