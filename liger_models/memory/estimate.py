"""Estimate of the memory that a training step needs, from running its blocks on tensors without values."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_models.kernels.dispatch import triton_assumed
from liger_models.kernels.loss.row_chunks import chunk_rows
from liger_models.kernels.optimizer.moments import has_blocks, moment_bytes
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import dequantized_to
from liger_models.layers.layer import CHECKPOINTING_POLICIES, is_replayable, layers_of, set_policy
from liger_models.layers.masks import Mask
from liger_models.layers.offload import COMING, SMALLEST


class Saved(NamedTuple):
    """Activations that one block saves for the backward, in bytes.

    Attributes:
        total: all of them.
        movable: those that offloading moves to host memory, in tensors that are large enough.
        largest: the largest of these tensors.
    """

    total: int
    movable: int
    largest: int


class TrainingMemory(NamedTuple):
    """Memory that a training step needs on one device, in bytes.

    Attributes:
        weights: the parameters.
        gradients: the gradients of all trained parameters.
        early_gradients: those that exist before the backward of the embedding.
        optimizer: the two moments of AdamW, with their scales if they have 8 bits, or the momentum of Muon.
        activations: policy of `Decoder.set_checkpointing` -> activations that the forward saves for the backward.
        head: the gradient of the head, if it is trained, and the logits of one chunk, which exist before the backward
            of the blocks.
        recomputed: policy -> activations that the backward of a block recomputes, as far as they take more than the
            logits of one chunk, which have been freed by then.
        logits: the logits of one chunk.
        blocks: policy -> what each block saves.
        moments: of each block, the moments that may live in host memory.
        staging: the buffer through which these moments pass.
        largest: the largest gradient of a parameter.
        tied: the lookup's gradient of a trained embedding that is also the head, beside that of the head.
        temporary: weights that exist twice during the computation: gathered, or dequantized.
    """

    weights: int
    gradients: int
    early_gradients: int
    optimizer: int
    activations: dict[str, int]
    head: int
    recomputed: dict[str, int]
    logits: int
    blocks: dict[str, tuple[Saved, ...]]
    moments: tuple[int, ...]
    staging: int
    largest: int
    tied: int
    temporary: int = 0

    @property
    def held(self) -> int:
        """Bytes that the forward holds for the backward besides what the blocks save."""
        return self.activations["none"] - sum(each.total for each in self.blocks["none"])

    def excess(self, policy: str, index: int) -> int:
        """Bytes by which what the backward of a block recomputes exceeds the logits of one chunk."""
        return max(self.blocks["none"][index].total - self.blocks[policy][index].total - self.logits, 0)

    def parts(
        self,
        policy: str | Sequence[str],
        accumulate: int = 1,
        *,
        offloaded: Collection[int] = (),
        host_moments: Collection[int] = (),
        in_backward: bool = False,
    ) -> dict[str, int]:
        """What the peak consists of.

        Gradients grow while activations are freed. So the peak is the largest of four moments: when the head computes
        the loss, when the backward of the blocks begins and when it ends, and when all gradients exist. This holds if
        blocks that save less come first. With ``accumulate`` above 1, gradients exist beside activations.

        Args:
            policy: one of `CHECKPOINTING_POLICIES`, or one for each block.
            accumulate: number of batches in a step.
            offloaded: indices of the blocks whose activations are offloaded.
            host_moments: indices of the blocks whose moments live in host memory.
            in_backward: each gradient is applied and freed in the backward, with one batch in a step.

        Returns:
            Name -> bytes. Their sum is the peak.
        """
        count = len(self.moments)
        policies = [policy] * count if isinstance(policy, str) else policy
        saved = [self.blocks[each][index] for index, each in enumerate(policies)]
        moved = sum(saved[index].movable for index in offloaded)
        kept = self.held + sum(each.total for each in saved) - moved
        fetched = min(moved, COMING + max((saved[index].largest for index in offloaded), default=0))
        excess = max((self.excess(each, index) for index, each in enumerate(policies)), default=0)
        # The gradient of a head that is also the embedding is complete when that of the embedding is.
        head = 0 if in_backward and not self.tied else self.head - self.logits
        block = {"a block's backward": self.logits + excess, "fetched": fetched}
        moments = [{"activations": kept, "head": self.head}, {"activations": kept, "head": head, **block}]
        if accumulate > 1:
            moments = [{**each, "gradients": self.gradients} for each in moments]
        else:
            moments.append({"gradients": (self.largest if in_backward else self.gradients) + self.tied})
            if not in_backward:
                moments.append({"gradients": self.early_gradients, **block})
        offloads = sum(self.moments[index] for index in host_moments)
        fixed: dict[str, int] = {"weights": self.weights, "temporary weights": self.temporary}
        fixed["moments"] = self.optimizer - offloads + (self.staging if offloads else 0)
        largest: dict[str, int] = max(moments, key=lambda each: sum(each.values()))
        return {**fixed, **largest}

    def peak(self, policy: str | Sequence[str], accumulate: int = 1, **options: Any) -> int:
        """Peak memory in bytes; arguments as for `parts`."""
        return sum(self.parts(policy, accumulate, **options).values())


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
    if model.groups.sharded is not None or any(hasattr(each, "full_tensor") for each in model.parameters()):
        raise ValueError(
            "training_memory: model must not be distributed, got a sharded one. Build another one on the meta device."
        )
    if moments_8bit and muon:
        raise ValueError("training_memory: moments_8bit are AdamW's, got muon with them. Leave one of them out.")
    size, adapters = dtype.itemsize, _adapter_parameters(model)
    kinds = {
        each: dtype if each.is_floating_point() and each not in adapters else each.dtype for each in model.parameters()
    }
    weights = {each: each.numel() * kind.itemsize for each, kind in kinds.items()}
    matrices = {*model.hidden_matrices().values()} if muon else set()
    matrix = model.lm_head.weight
    logits = chunk_rows(tokens, len(matrix), size, None) * len(matrix) * size
    head = matrix.requires_grad * matrix.numel() * size + logits
    current = model.checkpointing
    policies = [current] * len(model.layers) if isinstance(current, str) else current
    try:
        saved = {policy: tuple(_saved_by_block(model, policy, tokens, dtype)) for policy in CHECKPOINTING_POLICIES}
    finally:
        for block, policy in zip(model.layers, policies, strict=True):
            set_policy(block, policy)
    held = model.held_elements * tokens * size
    activations = {policy: sum(each.total for each in blocks) + held for policy, blocks in saved.items()}
    found = TrainingMemory(0, 0, 0, 0, activations, head, {}, logits, saved, (), 0, 0, 0)
    excess = {policy: [found.excess(policy, index) for index in range(len(model.layers))] for policy in saved}
    found = found._replace(recomputed={policy: max(each, default=0) for policy, each in excess.items()})

    def moments(parameter: nn.Parameter) -> list[int]:
        kind = kinds[parameter]
        if parameter in matrices:
            return [weights[parameter]]
        if moments_8bit:
            kind = torch.int8 if has_blocks(parameter.shape) else torch.float32
        return moment_bytes(parameter.shape, kind)

    return with_parameters(found, model, weights, moments)


def with_parameters(
    memory: TrainingMemory,
    model: Decoder,
    weights: Mapping[nn.Parameter, int],
    moments: Callable[[nn.Parameter], list[int]],
) -> TrainingMemory:
    """An estimate with the bytes of these parameters, whatever they are for the activations.

    Args:
        memory: the estimate.
        model: whose blocks hold the parameters.
        weights: parameter -> bytes on the device.
        moments: the bytes of each tensor that holds the moments of a parameter.
    """
    gradients = {each: size for each, size in weights.items() if each.requires_grad}
    sizes = {each: moments(each) for each in gradients}
    movable = [[sizes[each] for each in block.parameters() if each in sizes] for block in model.layers]
    movable = [[each for each in block if max(each) >= SMALLEST] for block in movable]
    matrix = model.embed_tokens.weight
    tied = matrix is model.lm_head.weight and matrix in gradients
    return memory._replace(
        weights=sum(weights.values()),
        gradients=sum(gradients.values()),
        early_gradients=sum(size for each, size in gradients.items() if tied or each is not matrix),
        optimizer=sum(map(sum, sizes.values())),
        moments=tuple(sum(map(sum, block)) for block in movable),
        staging=2 * max((sum(each) for block in movable for each in block), default=0),
        largest=max(gradients.values(), default=0),
        tied=(memory.head - memory.logits) * tied,
    )


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

    def held(self) -> list[int]:
        """The sizes of the storages that are still alive, in bytes."""
        return [nbytes for reference, nbytes in self._made.items() if not reference.expired()]


def _saved(storages: Sequence[int]) -> Saved:
    movable = [each for each in storages if each >= SMALLEST]
    return Saved(sum(storages), sum(movable), max(movable, default=0))


def _saved_by_block(model: Decoder, policy: str, tokens: int, dtype: torch.dtype) -> list[Saved]:
    """The activations that each block saves for the backward."""
    found: list[Saved] = []
    known: dict[str, Saved] = {}
    for index, block in enumerate(model.layers):
        set_policy(block, policy)
        if policy == "full" and is_replayable(block):
            found.append(_saved([tokens * model.config.hidden_size * dtype.itemsize]))
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


def _block_bytes(model: Decoder, block: nn.Module, tokens: int, dtype: torch.dtype) -> Saved:
    with FakeTensorMode(allow_non_fake_inputs=True), triton_assumed(), torch.enable_grad():
        adapters = _adapter_parameters(block)
        parameters = {
            name: torch.empty(
                parameter.shape,
                dtype=dtype if parameter.is_floating_point() and parameter not in adapters else parameter.dtype,
            ).requires_grad_(parameter.requires_grad)
            for name, parameter in block.named_parameters()
        }
        shape = (1, tokens, model.config.hidden_size)
        x, residual = (torch.empty(shape, dtype=dtype).requires_grad_() for _ in range(2))
        layout = model.layout((1, tokens), residual, position_ids=torch.arange(tokens))
        layout = model.stand_ins(layout, residual)
        for spec in (layer.attention for layer in layers_of(block)):
            if spec is not None:
                layout.masks[spec.window] = Mask(counted=True)
        with dequantized_to(block, dtype), _Allocations() as allocations:
            outputs = functional_call(block, parameters, (x, residual, layout))
        graph = [each.sum() for each in outputs if each is not None]  # hold the graph, but not the outputs
        del outputs
        held = allocations.held()
        del graph
    return _saved(held)
