"""Context parallel: each rank has a part of every sequence's tokens."""

from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from liger_models.kernels.collectives import ranks_of
from liger_models.layers.attention import LigerAttention
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.cross_attention import LigerCrossAttention

from .tensor import check_unsharded

Model = TypeVar("Model", bound=CausalLM)


def apply_cp(model: Model, mesh: DeviceMesh) -> Model:
    """Share the tokens of every sequence among the ranks of a mesh, in place: T / R for each, in order.

    The ranks must be given the same batch, whole, and get the same loss. Only in attention a token meets those of other
    ranks: there each rank has all tokens of 1 / R of the heads, so that packed documents, padding, windows and softcaps
    are what they are on one rank. Weights are whole: `apply_fsdp` afterwards, over a mesh that includes these ranks,
    shards them and averages their gradients (or DistributedDataParallel averages them). Towers run whole on each rank.

    Args:
        model: on the meta device, or with the same weights on every rank.
        mesh: of one dimension; R ranks, best those of one host. T must be a multiple of R, so not to generate.

    Returns:
        ``model``.

    Raises:
        ValueError: a model that is sharded already, a mesh that does not fit, KV heads that R does not divide. Make the
            model anew after that.

    Source: https://arxiv.org/abs/2309.14509.
    """
    check_unsharded("apply_cp", model, mesh)
    ranks = ranks_of(mesh.get_group())
    if ranks.size == 1:
        return model
    for module in model.layers.modules():
        if isinstance(module, LigerAttention | LigerCrossAttention):
            module.spread(ranks)
    model.context_ranks = model.balance_ranks = ranks
    return model
