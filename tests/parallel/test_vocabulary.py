"""A vocabulary on ranks: the head, the padding row, and sizes that the ranks do not divide."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liger_models.arch import get_arch
from liger_models.distributed.collectives import copy_to_region, group_of
from liger_models.kernels.loss.linear_cross_entropy import VocabShard, linear_cross_entropy
from liger_models.layers.embedding import zero_padding_row
from liger_models.parallel import (
    clip_grad_norm_,
    load_state,
    save_state,
)

from .comparison import assert_close, assert_same, build, shard_2d
from .conftest import Group, running
from .models import TINY, gradients, make_optimizer, tiny, whole


def gather_options(options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of a head whose words are cut over all ranks."""
    x, weight, target, token_weight = head_inputs()
    V, ranks = len(weight), group_of(dist.group.WORLD)
    vocab_shard = VocabShard(ranks, V)
    own = weight.detach()[vocab_shard.start : vocab_shard.start + vocab_shard.count].requires_grad_()
    outputs = linear_cross_entropy(
        copy_to_region(x, ranks),
        own,
        target,
        vocab_shard=vocab_shard,
        workspace_mib=1,
        token_weight=token_weight,
        **options,
    )
    return results_of(outputs, x, own)


def head_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(5)
    x, weight = torch.randn(2, 150, 16, requires_grad=True), torch.randn(1801, 16, requires_grad=True)
    target = torch.randint(1801, (2, 150))
    target[0, :7], target[1, -1] = -1, 1800
    return x, weight, target, torch.rand(2, 150)


def results_of(outputs: Any, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
    total = outputs.loss.square().sum()
    if outputs.log_probs is not None:
        total = total + outputs.log_probs.sin().sum()
    total.backward()
    return {
        "loss": outputs.loss.detach(),
        "z_loss": None if outputs.z_loss is None else outputs.z_loss.detach(),
        "log_probs": None if outputs.log_probs is None else outputs.log_probs.detach(),
        "dx": x.grad,
        "dweight": weight.grad,
    }


HEADS = {
    "mean": {},
    "sum, capped": {"reduction": "sum", "softcap": 5.0, "logit_scale": 0.5},
    "all": {"num_items": 17.0, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 8.0, "return_z_loss": True},
    "smoothed tokens": {"reduction": "none", "label_smoothing": 0.2, "z_loss": 1e-3, "return_z_loss": True},
    "log-probabilities": {"reduction": "sum", "return_log_probs": True, "logit_scale": 2.0, "softcap": 20.0},
}


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_a_vocabulary_on_ranks(four, options):
    """1801 words on four ranks, 300 tokens in several chunks."""
    options = {"ignore_index": -1, **options}
    x, weight, target, token_weight = head_inputs()
    outputs = linear_cross_entropy(x, weight, target, token_weight=token_weight, **options)
    expected = results_of(outputs, x, weight)
    dweight = expected.pop("dweight").chunk(4)
    for got, part in zip(four(gather_options, options), dweight, strict=True):
        assert_same({"dweight": got.pop("dweight"), "dx": got.pop("dx")}, {"dweight": part, "dx": expected["dx"]}, 2e-6)
        assert_close(got, {name: value for name, value in expected.items() if name != "dx"})


def with_padding(model: Any) -> dict[str, Any]:
    ids = torch.arange(3, 19).view(2, 8)
    ids[:, 4] = model.config.pad_token_id
    model(ids, labels=ids).loss.backward()
    return gradients(model)


def padding_row(pad: int, tied: bool) -> tuple[dict[str, Any], list[int]]:
    """The gradients, and the rows that are zero after the padding row of the sharded weight was set to 0."""
    model = shard_2d(tiny(pad_token_id=pad, tie_word_embeddings=tied), (2, 2))
    got = with_padding(model)
    zero_padding_row(model.embed_tokens)  # DTensor draws no numbers on the CPU
    zero = whole([("weight", model.embed_tokens.weight)])["weight"].eq(0).all(1)
    return got, zero.nonzero().flatten().tolist()


@pytest.mark.parametrize(("pad", "tied"), [(11, False), (96, True)])
def test_the_padding_row(four, pad, tied):
    """In the first rank's part of the vocabulary and in the last one's, under FSDP."""
    right = with_padding(tiny(pad_token_id=pad, tie_word_embeddings=tied))
    assert (right["embed_tokens.weight"][pad].norm() > 0) == tied
    for got, zero in four(padding_row, pad, tied):
        assert_same(got, right)
        assert zero == [pad]


ODD = {**TINY, "vocab_size": 25, "hidden_size": 24, "head_dim": 8, "initializer_range": 0.1}
"""Of 25 words two ranks have 13 and 12, of which three would have 5, 5 and 3, or 4 each."""


def odd_rows(folder: Path) -> dict[str, Any]:
    """In from a checkpoint, a step, and out into both kinds."""
    cls = get_arch("llama")
    shard = partial(shard_2d, shape=(3, 2)) if dist.is_initialized() else None
    model = cls.from_pretrained(folder / "plain", progress=False, shard=shard)
    optimizer = make_optimizer("liger", model)
    ids = torch.arange(24).view(2, 12)
    model(ids, labels=ids).loss.backward()
    results = {"gradients": gradients(model), "norm": clip_grad_norm_(model.parameters(), 1.0)}
    optimizer.step()
    if dist.is_initialized():
        save_state(folder / "run", 1, model, optimizer)
        model.save_pretrained(folder / "saved")
    return results | {"weights": whole(model.named_parameters())}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_vocabulary_that_no_number_of_ranks_divides(tmp_path, tied):
    model = build("llama", get_arch("llama").config_class(**ODD, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "plain")
    expected = odd_rows(tmp_path)
    with running(Group(6)) as six:
        for got in six(odd_rows, tmp_path):
            assert_close(got["norm"], expected["norm"])
            assert_same(got["gradients"], expected["gradients"])
            assert_same(got["weights"], expected["weights"])
    assert load_state(tmp_path / "run", model, make_optimizer("liger", model)) == 1
    saved = get_arch("llama").from_pretrained(tmp_path / "saved", progress=False)
    for each in (model, saved):
        assert_same(whole(each.named_parameters()), expected["weights"])


def head_kernels() -> None:
    """A target at the edges of a rank's words, one that is confident, and huge logits, in fp32."""
    ranks = group_of(dist.group.WORLD)
    V, vocab_shard = 75, VocabShard(ranks, 75)
    x = torch.eye(6, 8)
    weight = torch.randn(V, 8, generator=torch.Generator().manual_seed(0))
    weight[:6, :6] += 15 * torch.eye(6)
    weight[40, 3] = 3e4
    target = torch.tensor([0, 37, 38, 40, -100, 74])
    options = {"label_smoothing": 0.1, "z_loss": 1e-4, "reduction": "none"}
    found = []
    for own, told in (
        (weight, {}),
        (weight[vocab_shard.start : vocab_shard.start + vocab_shard.count], {"vocab_shard": vocab_shard}),
    ):
        leaves = x.clone().requires_grad_(), own.clone().requires_grad_()
        inside = copy_to_region(leaves[0], ranks) if told else leaves[0]
        loss = linear_cross_entropy(inside, leaves[1], target, **options, **told).loss
        loss.backward(torch.arange(1.0, 7.0))
        found.append((loss.detach(), leaves[0].grad, leaves[1].grad))
    (loss, dx, dweight), got = found
    assert_close(got, (loss, dx, dweight.chunk(2)[ranks.rank]))


def test_kernels_of_the_head(two, two_with_kernels):
    two(head_kernels)
    two_with_kernels(head_kernels)
