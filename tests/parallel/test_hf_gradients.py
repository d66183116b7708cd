"""Gradients under Hugging Face's names: those of transformers, and of a sharded model those of a single process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from liger_models import hf_gradients, hf_tensors
from liger_models.adapters import LoRAConfig, apply_lora

from ..late import transformers
from .comparison import assert_same
from .models import batch, share, tiny
from .test_agreement import moe
from .test_hf_tensors import by_hand, copies, ep, fsdp, tied, tp, tp_alone

CASES: list[tuple[Callable[[Any], Any], int]] = [
    (fsdp, 2), (tied, 2), (by_hand, 2), (tp_alone, 2), (ep, 2), (copies, 4), (tp, 4), (ep, 4),
]  # fmt: skip


def build(name: str) -> Any:
    return moe() if name == "ep" else tiny(tie_word_embeddings=name == "tied")


def gathered(apply: Callable[[Any], Any], expected: dict[str, Tensor]) -> None:
    model, name = apply(build(apply.__name__)), apply.__name__
    together = 2 if name.startswith("tp") else 1  # ranks that share a batch
    place, places = dist.get_rank() // together, dist.get_world_size() // together
    model(**share(batch(0), place, places), num_items_in_batch=33 / places).loss.backward()
    got = dict(hf_gradients(model))
    assert list(got) == list(expected)
    assert all(type(each) is Tensor and each.is_contiguous() for each in got.values())
    assert_same(got, expected)
    assert {each.dtype for _, each in hf_gradients(model, torch.bfloat16)} == {torch.bfloat16}
    assert_same(dict(hf_gradients(model, rank=1)), expected if dist.get_rank() == 1 else {})


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("apply", "ranks"), [pytest.param(*case, marks=pytest.mark.matrix if case[1] == 4 else ()) for case in CASES]
)
def test_gradients_of_a_sharded_model(two, four, apply, ranks):
    model = build(apply.__name__)
    model(**batch(0), num_items_in_batch=33).loss.backward()
    expected = {name: each.clone() for name, each in hf_gradients(model)}
    assert list(expected) == [name for name, _ in hf_tensors(model)]
    (two if ranks == 2 else four)(gathered, apply, expected)


def test_gradients_of_transformers(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rows = batch(0)
    for each in (model, theirs):
        each(input_ids=rows["input_ids"], labels=rows["labels"]).loss.backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert_same(dict(hf_gradients(model)), expected)

    model.layers[0].requires_grad_(False)
    model.zero_grad()
    model(**rows).loss.backward()
    got = dict(hf_gradients(model))
    assert {name for name in expected if name not in got} == {name for name in expected if "layers.0." in name}


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hf_gradients: .* must have gradients, got none. Call it between backward"):
        hf_gradients(tiny())
    model = apply_lora(tiny(), LoRAConfig(r=2))
    model(**batch(0)).loss.backward()
    with pytest.raises(ValueError, match=r"hf_gradients: .* must have gradients, got a model whose adapters alone are"):
        hf_gradients(model)
    with pytest.raises(ValueError, match="hf_gradients: dtype must be one of"):
        hf_gradients(model, torch.int8)
