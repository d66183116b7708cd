"""An estimate of a training step's memory, made by running the blocks on tensors without values."""

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
from liger_models.layers.layer import CHECKPOINTING_POLICIES, is_replayable, layers_of, routed_layers, set_policy
from liger_models.layers.lm_head import BIAS_COLUMNS
from liger_models.layers.masks import Mask
from liger_models.layers.offload import COMING, SMALLEST

WORKING_ROWS = 3
"""Number of tensors of the size of the residual stream that the backward of a block needs in addition to the block's
activations: gradients of the residual stream, of queries, keys and values, and of the output of attention. The number
fits the measured peaks of Llama-3-8B and 70B with 118,016 to 557,056 tokens (benchmarks/results)."""


class Saved(NamedTuple):
    """Bytes of the activations that one block saves for the backward.

    Attributes:
        total: bytes of all these activations.
        movable: bytes of those tensors that are large enough to be offloaded to host memory.
        largest: bytes of the largest tensor that can be offloaded.
    """

    total: int
    movable: int
    largest: int


class TrainingMemory(NamedTuple):
    """The memory that a training step needs on one device, in bytes.

    Attributes:
        weights: the parameters.
        gradients: the gradients of all parameters that are trained.
        early_gradients: the gradients that exist before the backward of the embedding.
        optimizer: the two moments of AdamW, including the scales of 8-bit moments, or the momentum of Muon.
        activations: for each policy of `Decoder.set_checkpointing`, the activations that the forward saves for the
            backward.
        head: the logits of one chunk and, if the head is trained, the head's gradient. Both exist before the backward
            of the blocks.
        recomputed: for each policy, the largest number of bytes by which a block's recomputed activations and
            ``working`` exceed the logits of one chunk. When a block recomputes its activations, the memory of the
            logits is free, so the activations can use this memory.
        logits: the logits of one chunk and, if the head has a bias, a copy of the head's weight that also holds the
            bias.
        blocks: for each policy, the activations that each block saves.
        moments: for each block, the bytes of the optimizer's moments that may be kept in host memory.
        staging: the buffer through which the device reads and writes moments in host memory.
        largest: the largest gradient of a parameter.
        tied: if the embedding is trained and tied to the head, the gradient of the embedding lookup, which exists in
            addition to the head's gradient; otherwise 0.
        temporary: gathered or dequantized copies of weights, which exist only during the computation.
        complete: for each block, the activations that exist when the whole block is recomputed.
        working: the gradients of activations that exist during the backward of a block.
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
    complete: tuple[int, ...] = ()
    working: int = 0

    @property
    def held(self) -> int:
        """Bytes that all parts outside of the blocks save for the backward."""
        return self.activations["none"] - sum(saved.total for saved in self.blocks["none"])

    def excess(self, policy: str, index: int) -> int:
        """Return the bytes by which a block's recomputed activations and the gradients of its activations exceed the
        logits of one chunk."""
        recomputed = max(self.complete[index] - self.blocks[policy][index].total, 0)
        return max(recomputed + self.working - self.logits, 0)

    def parts(
        self,
        policy: str | Sequence[str],
        accumulate: int = 1,
        *,
        offloaded: Collection[int] = (),
        host_moments: Collection[int] = (),
        in_backward: bool = False,
    ) -> dict[str, int]:
        """Return the parts of the memory at the time of the peak. Their sum is the peak.

        During the backward, gradients take more and more memory, and activations take less and less. Therefore, if each
        block saves at least as much as the blocks before it, the peak is reached at one of four times: when the head
        computes the loss, when the backward of the blocks begins, when the backward of the blocks ends, or when all
        gradients exist. If ``accumulate`` is above 1, all gradients exist at the same time as the activations. The peak
        must agree with `memory.search.Search._peaks`, which computes the peaks of many candidates at once.

        Args:
            policy: one of `CHECKPOINTING_POLICIES` for all blocks, or a sequence with a policy for each block.
            accumulate: number of batches in an optimizer step.
            offloaded: indices of the blocks whose activations are offloaded.
            host_moments: indices of the blocks whose moments are kept in host memory.
            in_backward: whether the optimizer applies and frees each gradient during the backward. This requires one
                batch per optimizer step.

        Returns:
            A dict from the name of each part to its bytes. The sum of the bytes is the peak.
        """
        count = len(self.moments)
        policies = [policy] * count if isinstance(policy, str) else policy
        saved = [self.blocks[name][index] for index, name in enumerate(policies)]

        # Find the activations on the device: all except the offloaded ones, plus those that are being copied back.
        moved = sum(saved[index].movable for index in offloaded)
        kept = self.held + sum(block.total for block in saved) - moved
        fetched = min(moved, COMING + max((saved[index].largest for index in offloaded), default=0))
        excess = max((self.excess(name, index) for index, name in enumerate(policies)), default=0)

        # List the memory that is in use at each of the four times. The gradient of a tied head is complete only when
        # the gradient of the embedding is complete.
        head = 0 if in_backward and not self.tied else self.head - self.logits
        block = {"a block's backward": self.logits + excess, "fetched": fetched}
        times = [{"activations": kept, "head": self.head}, {"activations": kept, "head": head, **block}]
        if accumulate > 1:
            times = [{**sizes, "gradients": self.gradients} for sizes in times]
        else:
            times.append({"gradients": (self.largest if in_backward else self.gradients) + self.tied})
            if not in_backward:
                times.append({"gradients": self.early_gradients, **block})

        # List the memory that is always in use.
        offloads = sum(self.moments[index] for index in host_moments)
        fixed: dict[str, int] = {"weights": self.weights, "temporary weights": self.temporary}
        fixed["moments"] = self.optimizer - offloads + (self.staging if offloads else 0)
        largest: dict[str, int] = max(times, key=lambda sizes: sum(sizes.values()))
        return {**fixed, **largest}

    def peak(self, policy: str | Sequence[str], accumulate: int = 1, **options: Any) -> int:
        """Return the peak memory in bytes. The arguments are as in `parts`."""
        return sum(self.parts(policy, accumulate, **options).values())


def training_memory(
    model: Decoder,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    moments_8bit: bool = False,
    muon: bool = False,
) -> TrainingMemory:
    """Estimate the memory of a training step with AdamW or Muon on one GPU, without sharding.

    Every block runs once per policy on tensors that have shapes but no values, and the sizes of all tensors that
    autograd then holds are added up. User-defined blocks and layers are therefore counted correctly, too. If several
    blocks are equal, only one of them runs. Frozen parameters are counted without gradients and moments. The
    activations of vision towers and of cross-attention to images are not counted.

    Args:
        model: the model, which must not be distributed. It may be on the meta device, so that it takes no memory.
        tokens: B · T, the number of tokens in a batch.
        dtype: dtype of weights, gradients, moments and activations. Adapters keep their own dtype.
        moments_8bit: whether the optimizer is ``LigerAdamW(state_dtype=torch.int8)``.
        muon: whether the optimizer is `LigerMuon`, with one momentum for each matrix. The temporary tensors of the
            optimizer are not counted, because they do not exist at the same time as activations.

    Raises:
        ValueError: a block cannot run on tensors without values, the model is distributed, or ``moments_8bit`` is given
            with ``muon``.
    """
    if model.groups.sharded is not None or any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ValueError(
            "training_memory: model must not be distributed, got a sharded one. Build another one on the meta device."
        )
    if moments_8bit and muon:
        raise ValueError("training_memory: moments_8bit are AdamW's, got muon with them. Leave one of them out.")

    # Find the bytes of each parameter in its dtype during training.
    size, adapters = dtype.itemsize, _adapter_parameters(model)
    dtypes = {
        parameter: dtype if parameter.is_floating_point() and parameter not in adapters else parameter.dtype
        for parameter in model.parameters()
    }
    weights = {parameter: parameter.numel() * dtypes[parameter].itemsize for parameter in dtypes}
    matrices = {*model.hidden_matrices().values()} if muon else set()

    # For the head, count the logits of one chunk and the gradient.
    matrix = model.lm_head.weight
    logits = chunk_rows(tokens, len(matrix), size, None, trained=matrix.requires_grad) * len(matrix) * size
    if getattr(model.lm_head, "bias", None) is not None:  # the loss gets a copy of the weight that holds the bias
        logits += (matrix.numel() + len(matrix) * BIAS_COLUMNS) * size
    head = matrix.requires_grad * matrix.numel() * size + logits

    # Measure the activations of the blocks under each policy. The policies of the model are restored.
    current = model.checkpointing
    policies = [current] * len(model.layers) if isinstance(current, str) else current
    try:
        saved = {policy: tuple(_saved_by_block(model, policy, tokens, dtype)) for policy in CHECKPOINTING_POLICIES}
    finally:
        for block, policy in zip(model.layers, policies, strict=True):
            set_policy(block, policy)
    held = model.held_elements * tokens * size
    activations = {policy: sum(block.total for block in blocks) + held for policy, blocks in saved.items()}

    # Compute the largest excess of recomputation from the other sizes. `with_parameters` adds the parameters later.
    complete = tuple(
        min(none.total, selective.total + _workspace(block, tokens, size, none.total))
        for block, none, selective in zip(model.layers, saved["none"], saved["selective"], strict=True)
    )
    working = WORKING_ROWS * tokens * model.config.hidden_size * size
    memory = TrainingMemory(
        0, 0, 0, 0, activations, head, {}, logits, saved, (), 0, 0, 0, complete=complete, working=working
    )  # fmt: skip
    excess = {policy: [memory.excess(policy, index) for index in range(len(model.layers))] for policy in saved}
    memory = memory._replace(recomputed={policy: max(sizes, default=0) for policy, sizes in excess.items()})

    def moments(parameter: nn.Parameter) -> list[int]:
        moment_dtype = dtypes[parameter]
        if parameter in matrices:
            return [weights[parameter]]
        if moments_8bit:
            moment_dtype = torch.int8 if has_blocks(parameter.shape) else torch.float32
        return moment_bytes(parameter.shape, moment_dtype)

    return with_parameters(memory, model, weights, moments)


def with_parameters(
    memory: TrainingMemory,
    model: Decoder,
    weights: Mapping[nn.Parameter, int],
    moments: Callable[[nn.Parameter], list[int]],
) -> TrainingMemory:
    """Return an estimate with the same activations, but with the given numbers of bytes for parameters, gradients and
    moments.

    Args:
        memory: the estimate.
        model: the model that the parameters belong to.
        weights: mapping from each parameter to its bytes on the device.
        moments: function that returns the bytes of each tensor that holds moments of a parameter.
    """
    gradients = {parameter: size for parameter, size in weights.items() if parameter.requires_grad}
    sizes = {parameter: moments(parameter) for parameter in gradients}

    # For each block, find the moments that are large enough to be kept in host memory.
    movable = [[sizes[parameter] for parameter in block.parameters() if parameter in sizes] for block in model.layers]
    movable = [[tensors for tensors in block if max(tensors) >= SMALLEST] for block in movable]

    # The gradient of a tied head exists before the backward of the embedding.
    matrix = model.embed_tokens.weight
    tied = matrix is model.lm_head.weight and matrix in gradients
    return memory._replace(
        weights=sum(weights.values()),
        gradients=sum(gradients.values()),
        early_gradients=sum(size for parameter, size in gradients.items() if tied or parameter is not matrix),
        optimizer=sum(map(sum, sizes.values())),
        moments=tuple(sum(map(sum, block)) for block in movable),
        staging=2 * max((sum(tensors) for block in movable for tensors in block), default=0),
        largest=max(gradients.values(), default=0),
        tied=(memory.head - memory.logits) * tied,
    )


def _adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of adapters, which keep their own dtype whatever the dtype of the model."""
    return {
        parameter
        for layer in layers_of(model)
        if layer.adapted
        for parameter in layer.get_submodule("lora").parameters()
    }


class _Allocations(TorchDispatchMode):
    """A context manager that records the storages allocated inside it, and lists the storages that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocated: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))

        # If an output uses the storage of an input, it is a view or was written in place, so nothing was allocated.
        inputs, outputs = (
            {StorageWeakRef(leaf.untyped_storage()): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
            for tree in ((args, kwargs), out)
        )
        for reference in outputs.keys() - inputs.keys():
            self._allocated.setdefault(reference, outputs[reference].untyped_storage().nbytes())
        return out

    def held(self) -> list[int]:
        """Return the bytes of each recorded storage that is still alive."""
        return [nbytes for reference, nbytes in self._allocated.items() if not reference.expired()]


def _saved(storages: Sequence[int]) -> Saved:
    movable = [nbytes for nbytes in storages if nbytes >= SMALLEST]
    return Saved(sum(storages), sum(movable), max(movable, default=0))


def _saved_by_block(model: Decoder, policy: str, tokens: int, dtype: torch.dtype) -> list[Saved]:
    """Measure the activations that each block saves for the backward."""
    saved: list[Saved] = []
    known: dict[str, Saved] = {}
    for index, block in enumerate(model.layers):
        set_policy(block, policy)
        if policy == "full" and is_replayable(block):  # saves only its input and the experts, which stay on the device
            block_input = _saved([tokens * model.config.hidden_size * dtype.itemsize])
            experts = tokens * sum(layer.top_k for layer in routed_layers(block)) * torch.int16.itemsize
            saved.append(block_input._replace(total=block_input.total + experts))
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
        saved.append(known[description])
    return saved


def _workspace(block: nn.Module, tokens: int, size: int, default: int) -> int:
    """Return the largest `Layer.workspace` of the layers of a block that the policy "selective" recomputes.

    If one of these layers does not use chunks, return ``default``.
    """
    recomputed = (layer for layer in layers_of(block) if layer.recomputed_share("selective"))
    sizes = [layer.workspace(tokens, size) for layer in recomputed]
    return max((default if nbytes is None else nbytes for nbytes in sizes), default=0)


def _description(block: nn.Module) -> str:
    """Describe a block without its index and the values of its parameters, so that equal blocks have the same text."""
    skipped = {"_parameters", "_buffers", "_modules", "layer"}
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    parts = [
        (path, type(module), {name: str(value) for name, value in vars(module).items() if name not in skipped})
        for path, module in block.named_modules()
    ]
    shapes = {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()}
    return re.sub(r"layers\.\d+\.", "layers.", repr((parts, shapes)))


def _block_bytes(model: Decoder, block: nn.Module, tokens: int, dtype: torch.dtype) -> Saved:
    """Measure the activations that a block saves, by running its forward on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), triton_assumed(), torch.enable_grad():
        # Replace the parameters by fake ones in the dtype of training.
        adapters = _adapter_parameters(block)
        parameters = {
            name: torch.empty(
                parameter.shape,
                dtype=dtype if parameter.is_floating_point() and parameter not in adapters else parameter.dtype,
                device="cpu",
            ).requires_grad_(parameter.requires_grad)
            for name, parameter in block.named_parameters()
        }

        # The batch is one row of tokens. A mask with ``counted`` stands for any mask. With such a mask, attention saves
        # the same tensors as a fused kernel.
        shape = (1, tokens, model.config.hidden_size)  # [1, tokens, C]
        x, residual = (torch.empty(shape, dtype=dtype, device="cpu").requires_grad_() for _ in range(2))
        layout = model.layout((1, tokens), residual, position_ids=torch.arange(tokens, device="cpu"))
        layout = model.stand_ins(layout, residual)
        for spec in (layer.attention for layer in layers_of(block)):
            if spec is not None:
                seen = layout if spec.chunk is None else layout.chunks[spec.chunk]
                seen.masks[spec.window] = Mask(counted=True)

        # Find the storages that only the autograd graph keeps alive.
        with dequantized_to(block, dtype), _Allocations() as allocations:
            outputs = functional_call(block, parameters, (x, residual, layout))
        graph = [output.sum() for output in outputs if output is not None]  # hold the graph, but not the outputs
        del outputs
        held = allocations.held()
        del graph
    return _saved(held)
