"""Context parallelism: each rank holds a part of the tokens of every sequence."""

from dataclasses import replace
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from liger_models.distributed.collectives import group_of
from liger_models.layers.decoder import Decoder
from liger_models.layers.layer import layers_of
from liger_models.parallel.agreement import check_first_forward, weight_samples
from liger_models.parallel.mesh import own_dimension, replicas
from liger_models.parallel.tensor import check_unsharded

Model = TypeVar("Model", bound=Decoder)


def apply_cp(model: Model, mesh: DeviceMesh, *, averaged: bool = False) -> Model:
    """Change a model in place, so that the R ranks of a mesh share the tokens of every sequence.

    Each rank has T / R consecutive tokens of a sequence of T tokens.

    All ranks must get the same complete batch, and all return the same loss. Tokens of different ranks interact only in
    attention. During attention, each rank has all tokens for 1 / R of the heads, so packed documents, padding, windows
    and softcaps work as they do on one rank. Every rank runs the complete vision tower.

    Weights are replicated. Call `apply_fsdp` afterwards with the same mesh, to shard the weights over all ranks and to
    average the gradients. Instead of `apply_fsdp`, you can use DistributedDataParallel over all ranks, which also
    averages the gradients. Without either of them, the first training forward raises an error.

    Args:
        model: the model, either on the meta device or with the same weights on every rank.
        mesh: the mesh of all ranks. It has a dimension "cp" with R ranks, or only this dimension. These R ranks should
            be on one host. T must be a multiple of R, so the model cannot generate.
        averaged: whether your own code, or an engine such as DeepSpeed, averages the gradients over all ranks.

    Returns:
        ``model``.

    Raises:
        ValueError: the model is already sharded, the mesh has no dimension "cp", or R does not divide the number of
            KV heads. After this error, some layers may have changed, so create the model again.

    Source: https://arxiv.org/abs/2309.14509.
    """
    check_unsharded("apply_cp", model)
    # Sample the weights while every rank has all of them.
    samples = weight_samples(model)
    group = group_of(own_dimension("apply_cp", mesh, "cp").get_group())
    if group.size == 1:
        return model
    # Change only the blocks. The model itself divides the tokens before the blocks, and a vision tower needs all
    # patches.
    for layer in layers_of(model.layers):
        layer.shard_tokens(group)
    model.groups = replace(model.groups, context=group, balance=group)
    check_first_forward(model, samples, averaged=averaged, replicas=replicas(mesh, None))
    return model
