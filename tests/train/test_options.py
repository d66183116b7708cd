"""Options come from files and from the command line, and what is wrong is named."""

import json
from dataclasses import dataclass
from dataclasses import field as option

import pytest

from liger_models.train.loop import TrainOptions
from liger_models.train.options import check_options, options_from, read_options
from liger_models.train.options import option as checked


@dataclass(kw_only=True)
class Options:
    """Some options.

    More about them.
    """

    data: list[str] = option(metadata={"help": "files"})
    name: str | None = option(default=None, metadata={"help": "of it"})
    steps: int | None = option(default=None, metadata={"help": "number"})
    rate: float = option(default=0.5, metadata={"help": "of learning"})
    fast_mode: bool = option(default=False, metadata={"help": "or not"})


def test_a_file_and_what_takes_precedence(tmp_path):
    values = {"data": "a", "rate": 2, "fast_mode": True, "name": None}
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("data: a\nrate: 2\nfast_mode: true\nname:\n")
    for name in ("a.json", "a.yaml"):
        assert read_options(Options, [str(tmp_path / name)]) == Options(data=["a"], rate=2.0, fast_mode=True)
    found = read_options(Options, [str(tmp_path / "a.yaml"), "--data", "b", "c", "--no-fast-mode", "--steps", "3"])
    assert found == Options(data=["b", "c"], rate=2.0, steps=3)
    (tmp_path / "b.yaml").write_text("data: [a, b]\nrate: 2e-5\nsteps: 10\n")
    assert read_options(Options, [str(tmp_path / "b.yaml")]) == Options(data=["a", "b"], rate=2e-5, steps=10)
    assert read_options(Options, ["--data", "x"]) == Options(data=["x"])
    exact = 2**63 - 1  # not a float
    assert read_options(Options, ["--data", "x", "--steps", str(exact)]).steps == exact
    assert options_from(Options, {"data": "x", "steps": exact}).steps == exact


def test_help(capsys):
    with pytest.raises(SystemExit):
        read_options(Options, ["--help"])
    shown = capsys.readouterr().out
    assert "Some options." in shown
    assert "of learning (default: 0.5)" in shown


def test_the_help_of_training_is_in_groups(capsys):
    with pytest.raises(SystemExit):
        read_options(TrainOptions, ["--help"])
    shown = capsys.readouterr().out
    titles = ["Model and data:", "Objective:", "Optimizer and precision:", "Adapters (LoRA):", "Parallelism, memory"]
    positions = [shown.index(f"\n{title}") for title in [*titles, "Log, evaluations and checkpoints:"]]
    assert positions == sorted(positions)
    assert positions[3] < shown.index("\n  --lora-plus-ratio") < positions[4]


@dataclass(kw_only=True)
class Checked:
    """Options with checks."""

    mode: str = checked("mode", "fast", choices=("fast", "slow"))
    modes: list[str] = checked("modes", [], choices=("fast", "slow"))  # noqa: RUF009
    size: int | None = checked("size", None, at_least=2)
    limit: float = checked("limit", 1.0, more_than=0, may_be_infinite=True)
    share: float = checked("share", 0.5, is_share=True)
    wait: float | None = checked("wait", None, read_by=("mode", ["slow"]))
    unit: str | None = checked("unit", None, needs="size")

    def __post_init__(self):
        check_options(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "none"}, "mode must be one of fast, slow, got 'none'."),
        ({"modes": ["slow", "none"]}, "modes must be one of fast, slow, got 'none'."),
        ({"size": 1}, "size must be at least 2, got 1."),
        ({"limit": 0.0}, "limit must be more than 0, got 0.0."),
        ({"limit": float("nan")}, "limit must be more than 0, got nan."),
        ({"share": float("inf")}, "share must be a share from 0 to 1, got inf."),
        ({"mode": "slow", "wait": float("inf")}, "wait must be finite, got inf."),
        ({"wait": 1.0}, "wait is an option of mode slow, got 1.0 with fast. Leave it out."),
        ({"unit": "s"}, "unit needs size, got s and None."),
    ],
)
def test_checks_of_the_fields(values, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Checked(**values)
    assert str(error.value) == f"Checked: {message}"


def test_values_that_the_checks_allow():
    allowed = Checked(mode="slow", modes="fast", size=2, limit=float("inf"), share=1, wait=2.0, unit="s")
    assert allowed.modes == ["fast"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": "a", "rat": 1}, "an option must be known, got rat. Did you mean rate?"),
        ({"data": "a", "learning": 1}, "got learning. Did you mean rate?"),  # by its help
        ({"data": "a", "zzz": 1}, "Did you mean data, fast_mode, name, rate, steps?"),
        ({"rate": 1}, "data must be given"),
        ({"data": "a", "rate": "fast"}, "rate must be float, got 'fast'"),
        ({"data": "a", "steps": 1.5}, "steps must be int, got 1.5"),
        ({"data": "a", "steps": True}, "steps must be int, got True"),
        ({"data": "a", "fast_mode": "yes"}, "fast_mode must be bool, got 'yes'"),
        ({"data": "a", "rate": None}, "rate must be float, got None"),
        ({"data": 3}, "data must be str, got 3"),
        ({"data": {"a": 1}}, "data must be str, got {'a': 1}"),
        ({"data": ["a", None]}, "data must be str, got ['a', None]"),
        ({"data": "a", "name": ["b"]}, "name must be str, got ['b']"),
        ({"data": "a", "steps": float("inf")}, "steps must be int, got inf"),
        ({"data": "a", 1: 2}, "an option must be known, got 1"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(ValueError, match=r"^Options: ") as error:
        options_from(Options, values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "a", "--rat", "1"], None),  # an abbreviation
        (["--data", "a", "--rats", "1"], "an option must be known, got --rats. Did you mean --rate?"),
        (["--data", "a", "--fast_mod=1"], "got --fast_mod. Did you mean --fast-mode?"),
        (["--data", "a", "--learning", "1"], "got --learning. Did you mean --rate?"),
        (["--data", "a", "--zzz"], "got --zzz. Did you mean --data, --fast-mode, --name, --rate, --steps?"),
        (["a.yaml", "b.yaml", "--rate=1"], "one file must hold the options, got also b.yaml"),
    ],
)
def test_an_unknown_option_of_the_command_line(capsys, arguments, message):
    if message is None:
        assert read_options(Options, arguments) == Options(data=["a"], rate=1.0)
        return
    with pytest.raises(SystemExit):
        read_options(Options, arguments)
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ")
    assert usage.endswith("[-h] [config] [--option value ...]")
    assert message in error


def test_arguments_without_a_name(tmp_path, capsys):
    def read(*arguments: str) -> Options:
        return read_options(Options, arguments, positionals=("name", "data"))

    assert read("n", "d") == read("--rate", "0.5", "n", "d") == read("n", "--rate", "0.5", "d")
    assert read("n", "d") == Options(name="n", data=["d"])
    assert read("n.d", "d.json") == Options(name="n.d", data=["d.json"])
    for ending in (".yaml", ".yml", ".json", ".YAML"):
        file = tmp_path / f"options{ending}"
        file.write_text('{"data": "d", "name": "n"}')
        assert read(str(file), "--rate", "2") == Options(name="n", data=["d"], rate=2.0)
    for arguments, message in {
        ("n",): "must be NAME DATA, or one file of options that ends in .yaml, .yml, .json, got n. Write --name --data",
        ("n", "d", "e"): "got n d e. Write --name --data",
        ("n", "d", "--data", "e"): "data must be given once, got d and --data. Leave one out.",
        ("a.yaml", "d"): "one file must hold the options, got also d. Leave it out.",
    }.items():
        with pytest.raises(SystemExit):
            read(*arguments)
        usage, error = capsys.readouterr().err.splitlines()
        assert usage.endswith("[-h] [config | NAME DATA] [--option value ...]")
        assert message in error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"[1]", "a.yaml: must hold options"),
        ("a.yaml", b"a: [", "a.yaml: must be YAML"),
        ("a.yaml", b"a: \xff", "a.yaml: must be YAML"),
        ("a.yaml", b"rate: 1\nname: x\nrate: 2", "a.yaml: must be YAML, got: rate twice"),
        ("a.json", b'{"rate": 1, "rate": 2}', "a.json: must be JSON, got: rate twice"),
        ("a.json", b"{", "a.json: must be JSON"),
        ("a.yaml", b'"\\e[2J": 1', r"got \x1b[2J"),
        ("a.yaml", None, "a.yaml: must be a file of options that can be read, got: No such file"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit):
        read_options(Options, [str(tmp_path / name)])
    assert message in capsys.readouterr().err
