"""Tests and the processes that they start ask only for an accelerator that is available."""

import pytest
import torch

from ..processes import run

ANSWER = "import torch\nprint(torch.accelerator.current_accelerator(), torch.accelerator.is_available())\n"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is available")
def test_an_absent_gpu_is_named(tmp_path):
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.current_accelerator(check_available=True) is None
    (tmp_path / "script.py").write_text(ANSWER)
    assert run(tmp_path / "script.py", cwd=tmp_path).stdout == "cuda False\n"
    assert run(tmp_path / "script.py", cwd=tmp_path, ranks=1).stdout == "cuda False\n"
