"""Checks that ranks have the same model and compatible batches. The checks run before the first forward and on demand.

Ranks exchange digests of 8 bytes. If digests differ, ranks exchange more data, so that the error can name the
difference.
"""

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from liger_models.distributed.ranks import is_distributed, rank, world_size
from liger_models.layers.decoder import Decoder
from liger_models.layers.layer import layers_of
from liger_models.layers.linear import is_sharded
from liger_models.parallel.checksum import sum_bits, version_of
from liger_models.parallel.gathered import fsdp_modules

SAMPLED = 4096
"""Number of elements of each weight that are compared between the ranks."""


def check_ranks(model: Decoder, batch: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError on all ranks if the ranks' models differ, or if ranks that share a batch have different batches.

    After `apply_fsdp`, `apply_tp`, `apply_cp` or `apply_ep`, the model calls this function before its first forward.
    Your own loop may call the function again, on all ranks. The function synchronizes with the device. Without a
    process group, the function does nothing.

    Args:
        model: the model. Its class, its configuration, and the shapes, dtypes and ``requires_grad`` of its parameters
            must be the same on all ranks. The weights must have been the same when `apply_fsdp`, `apply_tp`,
            `apply_cp` or `apply_ep` was called. To check this, a sample of each weight is compared. Weights that were
            loaded later are not compared.
        batch: keyword arguments of the model's forward. They must be the same on the ranks of a group of `apply_tp` or
            `apply_cp`. Integers are compared by value, and floating-point tensors by shape and dtype.

    Raises:
        ValueError: something differs (the message names the difference and two ranks); or ``fully_shard`` has sharded
            only some of the trained parameters, so the gradients of the other parameters are not averaged.
    """
    if not is_distributed():
        return
    if not any(isinstance(hook, FirstForward) for hook in model._forward_pre_hooks.values()):
        _check_hand_written(model)
    # Take the process groups that together connect all ranks of the model, or the default group if there are none.
    groups = model.groups
    experts = [layer.groups.expert for layer in layers_of(model) if layer.groups.expert is not None]
    over = [group.process_group for group in (groups.sharded, *experts[:1], *groups.data) if group is not None]
    over = over or [dist.group.WORLD]

    # First gather only digests. Gather the facts themselves only if digests differ.
    sharing = groups.sharded.members[0] if groups.sharded is not None else rank()
    facts = {"model": _facts_of_model(model), "batch": _facts_of_batch(batch or {})}
    digests = _gather((rank(), sharing, *map(_digest, facts.values())), over)
    if len({digest for _, _, digest, _ in digests}) > 1:
        _refuse(
            [_gather((rank(), facts["model"]), over)],
            "on all ranks",
            "Create the same model on every rank, from the same checkpoint or with the same seed.",
        )

    # Compare batches among the ranks that share a batch. The first of these ranks identifies the group.
    of_groups = {group: digest for _, group, _, digest in digests}
    if any(digest != of_groups[group] for _, group, _, digest in digests):
        batches = _gather((rank(), sharing, facts["batch"]), over)
        _refuse(
            [[(member, facts) for member, first, facts in batches if first == group] for group in of_groups],
            "on ranks that share a batch (apply_tp, apply_cp)",
            'Give them the same rows: PackedDataset takes rank=mesh["dp"].get_local_rank(), ranks=mesh["dp"].size().',
        )


def _refuse(groups: list[list[tuple[int, dict[str, str]]]], where: str, remedy: str) -> None:
    """Raise ValueError for the first property in which a rank differs from the first rank of its group."""
    for (first, expected), *others in groups:
        for other, got in others:
            for name in [*expected, *got]:
                one, another = (facts.get(name, "none") for facts in (expected, got))
                if one != another:
                    raise ValueError(
                        f"check_ranks: {name} must be the same {where}, got {one} on rank {first} and {another} on "
                        f"rank {other}. {remedy}"
                    )


class FirstForward:
    """Forward pre-hook that checks a distributed model before its first forward and before its first training forward.

    Args:
        averaged: whether the user has declared that gradients are averaged over the ranks.
        replicas: the ranks that hold replicas of this rank's weights. Gradients must be averaged over these ranks.
        samples: maps the name of each weight to a pair: the sample from before the weight was sharded
            (`weight_samples`), and the version of the weight after it was sharded.
    """

    only_checks = True
    """The hook does not change the forward; see `is_hooked`."""

    def __init__(
        self, averaged: bool, replicas: Collection[int], samples: Mapping[str, tuple[int, tuple[int, int]]]
    ) -> None:
        self.averaged, self.replicas, self.samples, self.agreed = averaged, replicas, samples, False

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError if the ranks' models or batches differ, or if gradients are not averaged over replicas."""
        if torch.compiler.is_compiling():
            return
        if not self.agreed:
            check_ranks(model, {**dict(zip(("input_ids",), args, strict=False)), **kwargs})
            self.agreed = True
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        # Without gradients there is nothing to average, so inference is allowed even if the model covers only a part
        # of the mesh.
        if not self.averaged and torch.is_grad_enabled() and is_trained:
            _check_averaged(model, self.replicas)
            self.averaged = True


def check_first_forward(
    model: Decoder, samples: Mapping[str, int], *, averaged: bool = False, replicas: Collection[int] = ()
) -> None:
    """Register a `FirstForward` hook on a model, after removing the hook that an earlier call has registered.

    Args:
        model: the model, which is already sharded.
        samples: the result of `weight_samples` from before the model was sharded.
        averaged, replicas: see `FirstForward`.
    """
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, FirstForward):
            averaged |= hook.averaged
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
    # Writing to a weight changes its version. From then on, the sample of the weight is ignored.
    versions = {name: version_of(parameter) for name, parameter in model.named_parameters()}
    dated = {name: (sample, versions[name]) for name, sample in samples.items() if name in versions}
    # The hook must run before FSDP's hooks, because FSDP's hooks exchange parameters and would hang if ranks differed.
    model.register_forward_pre_hook(FirstForward(averaged, replicas, dated), prepend=True, with_kwargs=True)
    if model.groups.context is None:
        # DistributedDataParallel reads this attribute first, and `_Refusal` then raises an error that names the remedy.
        # Without `_Refusal`, DistributedDataParallel would fail later, with an error about tensors.
        refusal: Any = _Refusal(type(model).__name__)
        model._ddp_params_and_buffers_to_ignore = refusal


class _Refusal:
    """An object that takes the place of a list of parameter names, and raises ValueError when DistributedDataParallel
    reads the list."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            f"DistributedDataParallel: {self._model} must not be sharded, got one after apply_tp, apply_ep or "
            "apply_fsdp. Call apply_fsdp(model, mesh), with the mesh of all ranks, and wrap nothing: it averages "
            "gradients over all ranks that hold copies of a weight."
        )


def weight_samples(model: Decoder) -> dict[str, int]:
    """Map each weight's name to its sample: the sum of the bits of its first `SAMPLED` elements before sharding.

    Samples differ if a rank has loaded another checkpoint or initialized weights with another seed. Two kinds of
    weights have no sample: weights on the meta device, and weights that were loaded after a first call of `apply_tp`,
    `apply_cp` or `apply_ep`.
    """
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, FirstForward):
            return current_samples(model, hook)
    parameters = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not (parameter.is_meta or is_sharded(parameter))
    }
    if world_size() == 1 or not parameters:
        return {}
    # Transfer all sums from the device at once.
    sums = [sum_bits(weight.reshape(-1)[:SAMPLED]) for weight in parameters.values()]
    return dict(zip(parameters, torch.stack([each.to(sums[0].device) for each in sums]).tolist(), strict=True))


def current_samples(model: Decoder, hook: FirstForward) -> dict[str, int]:
    """Return the samples (see `weight_samples`) of all weights that have not changed since the samples were taken."""
    versions = {name: version_of(parameter) for name, parameter in model.named_parameters()}
    return {name: sample for name, (sample, version) in hook.samples.items() if versions.get(name) == version}


def _check_averaged(model: Decoder, replicas: Collection[int]) -> None:
    """Raise ValueError if a weight's gradients are not averaged over the ranks that hold replicas of this weight.

    Args:
        model: the model, before its first training forward.
        replicas: see `FirstForward`.
    """
    groups = model.groups
    if groups.data and replicas:
        raise ValueError(
            "forward: the gradients of a model after apply_fsdp must be averaged over all ranks with copies of its "
            f"weights, {sorted(replicas)} among them, got a model on other dimensions of the mesh. Pass the whole mesh "
            "to apply_fsdp. If those ranks hold different parameters, or other code averages their gradients, pass "
            "averaged=True."
        )
    if groups.data:
        return
    if any(layer.groups.expert for layer in layers_of(model)):
        raise ValueError(
            "forward: a model after apply_ep must be sharded by apply_fsdp to be trained, got one that is not. Call "
            "apply_fsdp(model, mesh) after apply_ep; fully_shard cannot replace it."
        )

    # After only `apply_tp` or `apply_cp`, look for PyTorch's own wrappers over all ranks that hold replicas.
    needed = {rank(), *replicas}
    if len(needed) == 1:
        return
    function = "apply_tp" if groups.context is None else "apply_cp"
    ddp = DistributedDataParallel._get_active_ddp_module()
    over = [] if ddp is None else [dist.get_process_group_ranks(ddp.process_group)]
    # Read the meshes from FSDP's states instead of the parameters, because FSDP's hook may already have gathered the
    # parameters in the root module's group.
    states = [module._get_fsdp_state() for module in fsdp_modules(model)]
    sharded: list[Any] = [state._fsdp_param_group for state in states if state._fsdp_param_group]
    over += [group.mesh_info.mesh.mesh.flatten().tolist() for group in sharded]
    if (ddp is None and not _all_in_fsdp(model)) or not all(needed.issubset(ranks) for ranks in over):
        raise ValueError(
            f"forward: the gradients of a model after {function} must be averaged over all ranks, {sorted(needed)} "
            f"among them, got a model where they are not. Call apply_fsdp(model, mesh)"
            f"{' or DistributedDataParallel(model)' * (function == 'apply_cp')} over all ranks; if other code averages "
            f"them, pass averaged=True to {function}."
        )


def _check_hand_written(model: Decoder) -> None:
    """Raise ValueError if ``fully_shard`` has sharded only some of the trained parameters, because the gradients of the
    others would not be averaged."""
    if fsdp_modules(model) and not _all_in_fsdp(model):
        trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
        left_out = next((name for name in trained if not is_sharded(model.get_parameter(name))), "some")
        raise ValueError(
            f"check_ranks: fully_shard must shard all trained parameters, got a model in which {left_out} is not "
            "sharded, so that its gradient differs between the ranks. Call fully_shard(model) after the blocks, or "
            "apply_fsdp instead."
        )


def _all_in_fsdp(module: nn.Module) -> bool:
    """Return whether all trained parameters of a module belong to modules that FSDP2 has sharded."""
    has_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return isinstance(module, FSDPModule) or (not has_trained and all(map(_all_in_fsdp, module.children())))


def _facts_of_model(model: Decoder) -> dict[str, str]:
    """Map the names of settings and parameters to descriptions, which must be the same on all ranks."""
    config = model.config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    facts = {"the class": type(model).__name__, **{name: repr(value) for name, value in fields.items()}}
    samples: dict[str, int] = {}
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, FirstForward):
            samples = current_samples(model, hook)
    for name, parameter in model.named_parameters():
        state = "trained" if parameter.requires_grad else "frozen"
        sample = f" of checksum {samples[name]}" if name in samples else ""
        facts[name] = f"{list(parameter.shape)} {parameter.dtype}{sample}, {state}"
    return facts


def _facts_of_batch(batch: Mapping[str, Any]) -> dict[str, str]:
    """For each argument in a batch, describe its value: shape and dtype of a tensor, with a checksum of integers, or
    the value itself. Ranks that share the batch must have equal descriptions."""
    facts = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            facts[name] = f"{list(value.shape)} {value.dtype}"
            if value.is_meta:
                continue
            if value.numel() == 1:
                facts[name] += f" {value.item()}"
            elif not value.dtype.is_floating_point:
                # Each position has a factor of its own, so that the checksum changes if tokens are permuted.
                flat = value.detach().flatten().long()
                factors = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B1
                facts[name] += f" of checksum {int((flat * factors).sum())}"
        elif isinstance(value, int | float | str):
            facts[name] = repr(value)
    return facts


def _digest(facts: dict[str, str]) -> bytes:
    return hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=8).digest()


def _gather(mine: Any, groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """Gather the values of all ranks, ordered by rank. In the first group, each rank gathers the values of the group's
    ranks. In each later group, each rank gathers all values that the group's ranks have gathered before.
    """
    values = [mine]
    for group in groups:
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, values, group)
        values = [value for part in parts for value in part]
    return sorted(values, key=lambda value: value[0])
