"""What a run prints."""

import runpy
import sys
import warnings

import pytest

from liger_models.train.loop import main
from liger_models.train.report import say


def test_a_terminal_does_not_obey_data_and_samples(capsys):
    say("sample \x1b]0;title\x07", "two\n\tlines")
    assert capsys.readouterr().out == "sample \\x1b]0;title\\x07\ntwo\n\tlines\n"


def test_a_terminal_does_not_obey_an_error(tmp_path):
    output = tmp_path / "\x1b[2J"
    output.touch()
    arguments = ["--model", "nowhere", "--data", __file__, "--output", str(output)]
    with pytest.raises(SystemExit, match=r"error on rank 0: train: output must be a folder.*/\\x1b\[2J\. Name another"):
        main(arguments)


def test_a_terminal_does_not_obey_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "showwarning", None)
    monkeypatch.setattr(sys, "argv", ["train", "--unknown"])
    with pytest.raises(SystemExit):
        runpy.run_module("liger_models.train", run_name="__main__")
    warnings.showwarning(UserWarning("\x1b[2J"), UserWarning, "file.py", 1)
    assert capsys.readouterr().err.splitlines()[-1] == r"warning: \x1b[2J"
