"""Estimate of the memory that a training step needs, from running its blocks on tensors without values."""

import operator
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_models.kernels.checks import check
from liger_models.kernels.dispatch import triton_assumed
from liger_models.kernels.linear_cross_entropy import chunk_rows
from liger_models.kernels.moments import has_blocks, moment_bytes
from liger_models.layers.decoder import Decoder
from liger_models.layers.layer import CHECKPOINTING_POLICIES, is_replayable, layers_of, set_policy
from liger_models.layers.masks import Mask


class TrainingMemory(NamedTuple):
    """Memory that a training step needs, in bytes.

    Attributes:
        weights: the parameters.
        gradients: the gradients of all trained parameters.
        optimizer: the two moments of AdamW, with their scales if they have 8 bits, or the momentum of Muon.
        activations: policy of `Decoder.set_checkpointing` -> activations that the blocks save for the backward.
        head: the gradient of the head, if it is trained, and the logits of one chunk, which exist before the backward
            of the blocks.
        recomputed: policy -> activations that the backward of a block recomputes, as far as they take more than the
            logits of one chunk, which have been freed by then.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: dict[str, int]
    head: int
    recomputed: dict[str, int]

    def during(self, policy: str) -> int:
        """Bytes of what is saved and computed when the backward of the blocks begins."""
        return self.activations[policy] + self.head + self.recomputed[policy]

    def peak(self, policy: str) -> int:
        """Peak memory in bytes. Activations are freed as gradients are allocated, so only the larger of them counts."""
        return self.weights + self.optimizer + max(self.during(policy), self.gradients)


def training_memory(
    model: Decoder,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    moments_8bit: bool = False,
    muon: bool = False,
) -> TrainingMemory:
    """Estimate a training step on one GPU: AdamW or Muon, weights, gradients and moments in one dtype, no sharding.

    Every block runs once per policy on tensors that have shapes but no values, and the estimate sums what autograd then
    holds. User-defined blocks and layers are therefore counted correctly; blocks that are equal run once. Frozen
    parameters have neither gradients nor moments. Activations of vision towers and of cross-attention to images are not
    counted.

    Args:
        model: the model, which must not be distributed. It may be on the meta device, where it needs no memory. It may
            have adapters, which are in their own dtype.
        tokens: B · T.
        dtype: dtype of weights, gradients, moments and activations.
        moments_8bit: the moments are those of ``LigerAdamW(state_dtype=torch.int8)``.
        muon: the optimizer is `LigerMuon`, with one momentum for each matrix. What it gathers and computes during the
            step, when no activation exists, is not counted.

    Raises:
        ValueError: a block cannot run on tensors without values, the model is distributed, or ``moments_8bit`` is given
            with ``muon``.
    """
    check(
        model.groups.sharded is None and not any(hasattr(each, "full_tensor") for each in model.parameters()),
        "training_memory: model must not be distributed, got a sharded one. Build another one on the meta device.",
    )
    check(
        not (moments_8bit and muon),
        "training_memory: moments_8bit are AdamW's, got muon with them. Leave one of them out.",
    )
    size, adapters = dtype.itemsize, _adapter_parameters(model)
    sizes = {each: each.numel() * (each.itemsize if each in adapters else size) for each in model.parameters()}
    gradients = sum(bytes_ for each, bytes_ in sizes.items() if each.requires_grad)
    optimizer = 2 * gradients
    if moments_8bit:
        shapes = [each.shape for each in sizes if each.requires_grad]
        kinds = [torch.int8 if has_blocks(shape) else torch.float32 for shape in shapes]
        optimizer = sum(sum(moment_bytes(*each)) for each in zip(shapes, kinds, strict=True))
    if muon:
        optimizer -= sum(sizes[each] for each in model.hidden_matrices().values() if each.requires_grad)
    matrix = model.lm_head.weight
    logits = chunk_rows(tokens, len(matrix), size, None) * len(matrix) * size
    head = matrix.requires_grad * matrix.numel() * size + logits
    current = model.checkpointing
    policies = [current] * len(model.layers) if isinstance(current, str) else current
    try:
        saved = {policy: _saved_by_block(model, policy, tokens, dtype) for policy in CHECKPOINTING_POLICIES}
    finally:
        for block, policy in zip(model.layers, policies, strict=True):
            set_policy(block, policy)
    held = model.held_elements * tokens * size
    activations = {policy: sum(blocks) + held for policy, blocks in saved.items()}
    more = {policy: map(operator.sub, saved["none"], blocks) for policy, blocks in saved.items()}
    recomputed = {policy: max(max(blocks, default=0) - logits, 0) for policy, blocks in more.items()}
    return TrainingMemory(sum(sizes.values()), gradients, optimizer, activations, head, recomputed)


def _adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of adapters, which keep their dtype whatever that of the model is."""
    return {each for layer in layers_of(model) if layer.adapted for each in layer.get_submodule("lora").parameters()}


class _Allocations(TorchDispatchMode):
    """Records the storages that are allocated in its context, to tell which of them are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken, made = (
            {StorageWeakRef(each.untyped_storage()): each for each in tree_leaves(tree) if isinstance(each, Tensor)}
            for tree in ((args, kwargs), out)
        )
        for reference in made.keys() - taken.keys():
            self._made.setdefault(reference, made[reference].untyped_storage().nbytes())
        return out

    def held(self) -> int:
        """Total size of the storages that are still alive, in bytes."""
        return sum(nbytes for reference, nbytes in self._made.items() if not reference.expired())


def _saved_by_block(model: Decoder, policy: str, tokens: int, dtype: torch.dtype) -> list[int]:
    """Bytes of activations that each block saves for the backward."""
    found: list[int] = []
    known: dict[str, int] = {}
    for index, block in enumerate(model.layers):
        set_policy(block, policy)
        if policy == "full" and is_replayable(block):
            found.append(tokens * model.config.hidden_size * dtype.itemsize)
            continue
        description = _description(block)
        if description not in known:
            try:
                known[description] = _block_bytes(model, block, tokens, dtype)
            except Exception as error:
                raise ValueError(
                    f"training_memory: layers.{index} ({type(block).__name__}) must run on tensors without values, got "
                    f"{type(error).__name__}: {error}. Its activations cannot be estimated."
                ) from error
        found.append(known[description])
    return found


def _description(block: nn.Module) -> str:
    """All that a block consists of, but for its index and the values of its parameters. Equal blocks save the same."""
    skipped = {"_parameters", "_buffers", "_modules", "layer"}
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    parts = [
        (path, type(module), {name: str(value) for name, value in vars(module).items() if name not in skipped})
        for path, module in block.named_modules()
    ]
    shapes = {name: (each.shape, each.dtype, each.requires_grad) for name, each in tensors.items()}
    return re.sub(r"layers\.\d+\.", "layers.", repr((parts, shapes)))


def _block_bytes(model: Decoder, block: nn.Module, tokens: int, dtype: torch.dtype) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True), triton_assumed(), torch.enable_grad():
        adapters = _adapter_parameters(block)
        parameters = {
            name: torch.empty(each.shape, dtype=each.dtype if each in adapters else dtype).requires_grad_(
                each.requires_grad
            )
            for name, each in block.named_parameters()
        }
        shape = (1, tokens, model.config.hidden_size)
        x, residual = (torch.empty(shape, dtype=dtype).requires_grad_() for _ in range(2))
        layout = model.layout((1, tokens), residual, position_ids=torch.arange(tokens))
        layout = model.stand_ins(layout, residual)
        for spec in (layer.attention for layer in layers_of(block)):
            if spec is not None:
                layout.masks[spec.window] = Mask(counted=True)
        with _Allocations() as allocations:
            outputs = functional_call(block, parameters, (x, residual, layout))
        graph = [each.sum() for each in outputs if each is not None]  # hold the graph, but not the outputs
        del outputs
        held: int = allocations.held()
        del graph
    return held
