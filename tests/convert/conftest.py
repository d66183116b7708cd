"""Checkpoints made by transformers, and comparisons bit by bit."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ..late import transformers

DATA = Path(__file__).parents[1] / "fixtures"
CONFIGS = sorted(path.with_name(path.name.replace(".shapes", "")) for path in DATA.glob("*/*.shapes.json"))
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


MANY = 2 * 2**20
"""Largest size in bytes of names and shapes of a checkpoint whose tests are not slow."""


def _marked(path: Path) -> Any:
    slow = path.with_suffix(".shapes.json").stat().st_size > MANY
    return pytest.param(path, marks=pytest.mark.slow if slow else (), id=path.stem)


@pytest.fixture(params=[_marked(path) for path in CONFIGS])
def config_file(request: pytest.FixtureRequest) -> Path:
    """A config.json of the hub, in the folder of its model_type."""
    return request.param


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder with transformers: random weights of a tiny Llama."""

    def make(
        name: str = "hf", *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **config: Any
    ) -> Path:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(TINY | config)))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)  # norms and biases too
        model.to(dtype).save_pretrained(tmp_path / name, max_shard_size=max_shard_size)
        return tmp_path / name

    return make


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same_bits(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        one, other = (each.contiguous().flatten().view(torch.uint8) for each in (got[name], tensor))  # numbers, too
        assert torch.equal(one, other), name


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file. None removes a key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
