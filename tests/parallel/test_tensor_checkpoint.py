"""Checkpoints and training states of models that apply_tp has sharded."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liger_models.arch import get_arch
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.parallel import (
    load_state,
    save_state,
    targets_per_rank,
)

from ..arch.families import beyond_kinds
from .comparison import CHECKPOINTS, assert_close, assert_same, batch_for, build, shard_2d
from .images import FAMILIES, image_config
from .models import TINY, gradients, make_optimizer, whole


def checkpoint_model(arch: str) -> Any:
    if arch in FAMILIES:
        return build(*image_config(arch))
    config = get_arch(arch).config_class(**{**TINY, "initializer_range": 0.1, **CHECKPOINTS[arch]})
    return build(arch, config)


def checkpoint_loss(model: Any) -> torch.Tensor:
    if isinstance(model, VisionLanguageModel):
        return model(**batch_for(model, 0)).loss
    ids = torch.arange(3, 19).view(2, 8)
    return model(ids, labels=ids).loss


def load_and_save(arch: str, source: Path, target: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    shard = partial(shard_2d, shape=shape)
    model = get_arch(arch).from_pretrained(source, progress=False, shard=shard)
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.config.tie_word_embeddings
    model.save_pretrained(target)
    checkpoint_loss(model).backward()
    return {"weights": whole(model.named_parameters()), "gradients": gradients(model)}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        *((arch, (2,)) for arch in ("gemma2", "qwen3_moe", "mllama")),
        *(pytest.param(arch, (2, 2), marks=beyond_kinds(arch)) for arch in (*CHECKPOINTS, *FAMILIES)),
    ],
)
def test_in_and_out_of_a_checkpoint(two, four, tmp_path, arch, shape):
    model = checkpoint_model(arch)
    model.save_pretrained(tmp_path / "plain")
    checkpoint_loss(model).backward()
    group = two if shape == (2,) else four
    for got in group(load_and_save, arch, tmp_path / "plain", tmp_path / "saved", shape):
        assert_close(got["weights"], whole(model.named_parameters()), rtol=0, atol=0)
        assert_same(got["gradients"], gradients(model))
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
    if arch in CHECKPOINTS and arch != "qwen3_moe":  # whose experts transformers keeps in another layout
        import transformers

        _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert not any(info.values())


def stop_and_go_on(arch: str, folder: Path, shape: tuple[int, ...], resumed: bool) -> dict[str, Any]:
    model = shard_2d(checkpoint_model(arch), shape)
    optimizer = make_optimizer("liger", model)
    start = load_state(folder, model, optimizer) if resumed else 0
    rank, ranks = (dist.get_rank() // 2, 2) if len(shape) == 2 else (0, 1)
    for step in range(start, 2):
        inputs = batch_for(model, step, dp=(rank, ranks))
        model(**inputs, num_items_in_batch=targets_per_rank(inputs)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and not resumed:
            save_state(folder, 1, model, optimizer)
    return whole(model.named_parameters())


@pytest.mark.cases(1)
@pytest.mark.parametrize("arch", ["llama", "mllama"])
def test_stopping_and_going_on(two, four, tmp_path, arch):
    expected = four(stop_and_go_on, arch, tmp_path, (2, 2), False)[0]
    for got in four(stop_and_go_on, arch, tmp_path, (2, 2), True):
        assert_close(got, expected, rtol=0, atol=0)
    for got in two(stop_and_go_on, arch, tmp_path, (2,), True):  # on another number of ranks
        assert_same(got, expected)
