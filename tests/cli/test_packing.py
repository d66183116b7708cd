"""`liger-models verify --packing`: families pass, and models that leak on purpose fail."""

import json
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("typer", reason="needs the extra cli")

from typer.testing import CliRunner

from liger_models import LigerLlama, LlamaConfig, register
from liger_models.arch import get_arch
from liger_models.arch.llama import LlamaBlock
from liger_models.cli import commands, packing

from ..arch.families import ARCHS, FIRST_CASES, make_folder, of_each_kind

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("packed")


def verify(model, *, code: int = 0):
    """The first line, and the lines of the checks with the verdict."""
    done = CliRunner().invoke(commands.app, ["verify", "--packing", str(model), "--device", "cpu"])
    assert done.exit_code == code, done.output
    about, *lines = done.stdout.splitlines()
    return about, lines


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", of_each_kind(FIRST_CASES), ids="-".join)
def test_documents_of_every_family_are_independent(case, root):
    pytest.importorskip("transformers")
    about, lines = verify(make_folder(*case, root))
    assert about.endswith("float32 on cpu, its weights")
    assert len(lines) == len(packing.LENGTHS) + 3
    assert all(line.startswith("same: ") for line in lines[:-1])
    assert lines[-1] == "packed documents are independent"


@pytest.mark.cases(4)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_smaller_model_has_all_kinds_of_blocks(arch):
    """It runs, and is small enough for every machine."""
    whole = packing.empty_default(arch)
    small = packing.reduced(type(whole), whole.config, torch.float32, "cpu")
    assert {packing._kind(block)[0][1] for block in small.layers} == {packing._kind(b)[0][1] for b in whole.layers}
    small.visual = None
    assert small.num_parameters() < 50e6


class Forgetful(LigerLlama):
    """Llama that takes a row for one document."""

    def forward(self, input_ids=None, *, cu_seqlens=None, **options):
        return super().forward(input_ids, **options)


class Mixing(LlamaBlock):
    """Llama's block, to which each token adds a little of the one before it, of whatever document."""

    def forward(self, x, residual, layout):
        x, residual = super().forward(x, residual, layout)
        return x + 1e-9 * torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0)), residual


class Convolving(LigerLlama):
    """Llama with the leak of `Mixing`, far below rounding."""

    block_class = Mixing


class Unsteady(LigerLlama):
    """Llama whose packed rows have a loss that counts one document twice."""

    def forward(self, input_ids=None, *, labels=None, cu_seqlens=None, **options):
        out = super().forward(input_ids, labels=labels, cu_seqlens=cu_seqlens, **options)
        return out if labels is None or cu_seqlens is None else out._replace(loss=out.loss * 1.01)


@pytest.mark.parametrize(
    ("leaky", "told"),
    [
        (Forgetful, ["DIFFERS: document 2, 1 token: ", "it reads document 1", "it reads documents 1, 2"]),
        (Convolving, ["DIFFERS: document 2, 1 token: ", "it reads document 1", "it reads documents 1, 2"]),
        (Unsteady, ["DIFFERS: loss: 1.0e-02 from the sum"]),
    ],
)
def test_a_leak_is_found(leaky, told, tmp_path, own_registry):
    @dataclass(frozen=True, kw_only=True)
    class Config(LlamaConfig):
        """As Llama's."""

    leaky.config_class = Config
    register("leaky", leaky)
    leaky.from_config(Config(**SIZES)).save_pretrained(tmp_path)
    _, lines = verify(tmp_path, code=commands.DIFFERS)
    assert lines[-1] == "packed documents are NOT what they are alone"
    assert all(any(text in line for line in lines) for text in told), lines
    assert lines[0].startswith("same: document 1, ")  # nothing is before it


def test_a_model_that_does_not_fit_is_reduced(tmp_path, monkeypatch):
    LigerLlama.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    monkeypatch.setattr(packing, "free_memory", lambda device: 2**10)
    about, lines = verify(tmp_path)
    assert "1 layers, float32 on cpu, random weights, because the whole model needs 0.0 GiB" in about
    assert lines[-1] == "packed documents are independent"
    (tmp_path / "model.safetensors").unlink()
    assert verify(tmp_path)[0].endswith("has no safetensors")


def test_a_model_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(get_arch("ernie4_5").config_class, "num_hidden_layers", 1)
    done = CliRunner().invoke(commands.app, ["verify", "--packing", "ernie4_5", "--device", "cpu", "--json"])
    told = json.loads(done.stdout)
    assert told["same"]
    assert told["model"].endswith("random weights, because ernie4_5 is a model type")
    assert [check["passed"] for check in told["checks"]] == [True] * 8


def test_a_model_type_without_default_sizes():
    @dataclass(frozen=True, kw_only=True)
    class Config(LlamaConfig):
        """Llama's, with a field that must be given."""

        depth: int

    with pytest.raises(ValueError, match=r"Config\.depth must have a default, got none\. Give a folder"):
        packing.default_config(Config)
