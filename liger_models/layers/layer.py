"""The base class of layers. Code that handles all layers calls the methods of this class, and never checks which class
a layer has.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups

CHECKPOINTING_POLICIES = ("none", "selective", "full")


class AttentionSpec(NamedTuple):
    """The masks, rotary tables and cache that an attention layer needs, and its floating-point operations.

    Attributes:
        cache_slot: index of the layer's keys and values in the decode cache; None if the layer stores no keys and
            values.
        rotary: name of the rotary embedding that rotates queries and keys; None for no rotation.
        window: number of tokens that a token attends to, including itself; None for all.
        needs_mask: whether the kernel needs a mask even for plain causal attention, as attention with a softcap does.
        pair_flops: number of floating-point operations in the forward for each pair of a query and a visible key.
        needs_flash: whether the kernel needs a mask on accelerators if the dtype is not half precision, as attention
            with sinks does. On the CPU and in half precision, the kernel needs no mask for plain causal attention.
        takes_pages: whether the layer can read keys and values from pages of a `PagedCache` in a decoding step.
        caches_latents: whether the decode cache holds one vector per token, from which keys and values are computed.
        chunk: number of tokens per chunk, if tokens attend only to their own chunk of a document; otherwise None.
    """

    cache_slot: int | None
    rotary: str | None
    window: int | None
    needs_mask: bool
    pair_flops: int
    needs_flash: bool = False
    takes_pages: bool = False
    caches_latents: bool = False
    chunk: int | None = None

    def pairs(self, lengths: Tensor) -> Tensor:
        """Return the number of pairs of a query and a visible key, [n] floats, for documents of these ``lengths``."""
        # The number of pairs grows with the square of the length up to the window or chunk size, and linearly beyond
        # it.
        if self.chunk is not None:
            rest = lengths % self.chunk
            return ((lengths - rest) * self.chunk + rest * rest) / 2
        near = lengths if self.window is None else lengths.clamp(max=self.window)
        return near * near / 2 + (lengths - near) * near


class Layer(nn.Module):
    """A module whose methods define how the module is recomputed, how it is sharded, and how its weights are
    initialized.

    The defaults suit a layer that has no parameters and recomputes nothing. A module that is not a `Layer` is treated
    as if it had these defaults. Where the defaults would silently produce wrong results, such a module is rejected. For
    example, `apply_tp` rejects modules with parameters whose gradients would not be summed.
    """

    replayable: bool = True
    """Whether a block with this layer may be recomputed as a whole, which requires that a second forward gives the same
    result. A layer that chooses keeps its choice for the second forward (`liger_models.layers.recompute.keep_choice`).
    """
    recurrent: bool = False
    """Whether the decode cache keeps a state of the layer that summarizes all earlier tokens. Padding after a prompt
    would change such a state."""
    needs_bounds: bool = False
    """Whether the layer reads `BatchLayout.bounds`, the boundaries of packed documents."""
    batch_invariant: bool = True
    """Whether the result for a token is independent of the batch's other rows within the context manager
    `batch_invariant`."""
    needs_images: bool = False
    """Whether the layer is skipped for text without images."""
    active_share: float = 1.0
    """Fraction of the layer's own parameters that are active for a token. For routed experts, this is top_k /
    num_experts.
    """
    token_flops: int = 0
    """Floating-point operations per token in the forward, except those of products with weights and of `attention`.
    """
    adapted: tuple[str, ...] = ()
    """Names of the layer's own parameters that have adapters. The adapters are in the submodule ``lora``.
    """
    linears: tuple[str, ...] = ()
    """Names of the layer's linear layers whose products may be computed in another dtype (float8)."""
    router: nn.Module | None = None
    """The module that routes tokens to experts, such as a linear layer; None for a layer without experts."""
    top_k: int = 0
    """Number of experts that a token passes through, for a layer with a router."""
    num_experts: int = 0
    """Number of experts, for a layer with a router."""
    switch_length: int | None = None
    """Length beyond which a rotary embedding changes all frequencies, even for cached tokens; None if there is no such
    length.
    """
    groups: ParallelGroups = ParallelGroups()
    """The process groups that the layer is distributed over."""
    wide: tuple[str, ...] = ()
    """Names of the layer's own parameters that stay in fp32 even if the model is in half precision. FSDP2 gathers these
    parameters as a separate group. A layer with such parameters therefore has no other parameters, and reads its
    parameters only in its forward.
    """

    overrides_forward: bool = False
    """Whether the class overrides ``forward`` but not ``_add_norm``. If so, the inherited ``_add_norm`` must not be
    used, because it does not call ``forward``. `__init_subclass__` sets this attribute in every derived class.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls) or "_add_norm" in vars(cls):
            cls.overrides_forward = "_add_norm" not in vars(cls)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if not self.wide:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

        def moved(tensor: Tensor) -> Tensor:
            """Apply ``fn``. If ``fn`` would round the tensor to half precision, only move the tensor to its new device,
            in fp32."""
            like = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if like.dtype not in (torch.float16, torch.bfloat16):
                return fn(tensor)  # type: ignore[no-any-return]
            return tensor.to(like.device, torch.float32)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    @property
    def attention(self) -> AttentionSpec | None:
        """The `AttentionSpec` of a layer with self-attention over the text; None for all other layers."""
        return None

    def set_policy(self, policy: str) -> None:
        """Choose what the layer recomputes in the backward; ``policy`` is one of `CHECKPOINTING_POLICIES`."""

    def set_gate_up_8bit(self, enabled: bool) -> bool:
        """Choose whether the gates and ups of an MLP are saved in 8 bits for the backward.

        Return whether the layer can do this. By default, a layer ignores the call and returns False.
        """
        return False

    def set_attention_dropout(self, probability: float) -> None:
        """Set the probability of dropping an attention weight in training.

        Layers without attention ignore this call.
        """

    def recomputed_share(self, policy: str) -> float | None:
        """Return the fraction of the forward's operations that the backward repeats under a policy.

        The fraction applies to the layer and to its submodules, except for submodules that return their own fraction.
        None means that the layer recomputes nothing by itself. Its operations are then repeated only if the whole block
        is recomputed.
        """
        return None

    def workspace(self, tokens: int, size: int) -> int | None:
        """Return the bytes of the intermediate activations of a backward that recomputes them in chunks of tokens.

        The gradients that are summed over the chunks are included. None means that the layer does not use chunks.

        Args:
            tokens: number of tokens.
            size: bytes of an element.
        """
        return None

    def can_shard(self, size: int) -> bool:
        """Whether the layer can be split into ``size`` equal shards."""
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """Turn the whole layer into this rank's shard (tensor parallelism).

        Args:
            group: the process group to shard over.

        Returns:
            A mapping from the name of each sharded parameter, relative to the layer, to the dimension along which it is
            sharded. All other parameters are replicated.

        Raises:
            ValueError: the layer cannot be split into equal shards.
        """
        return {}

    def shard_experts(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the experts on each of R ranks (expert parallelism).

        The result has the same form as the result of `shard`.
        """
        return {}

    def shard_tokens(self, group: Group) -> None:
        """Prepare the layer for context parallelism, where each of R ranks has 1 / R of the tokens of every sequence.

        Args:
            group: the process group whose ranks have different tokens.

        Raises:
            ValueError: the heads cannot be divided equally among the ranks.
        """

    def sum_gradients(self, group: Group) -> bool:
        """Make the backward sum the gradients of replicated parameters over the ranks (sequence parallelism).

        Args:
            group: the process group whose ranks have different tokens.

        Returns:
            Whether this method or `shard` has made sure that these gradients are summed.
        """
        return False

    def draw(self, std: float) -> bool:
        """Initialize the layer's own parameters; ``std`` is the config's ``initializer_range``.

        Returns:
            Whether the layer has initialized its own parameters. If not, the caller calls the layer's
            ``reset_parameters`` after the ``reset_parameters`` of its submodules.
        """
        return False

    def choose(self, router_logits: Tensor) -> Tensor:
        """Return the experts [N, K] int64 that a layer with a router chooses for router logits [N, X]."""
        raise AttributeError(f"{type(self).__name__} has no router")

    def adapted_weight(self, name: str, *, merge: bool) -> Tensor:
        """Return one of the parameters that `adapted` lists, in the form that it has in a layer without adapters.

        If ``merge`` is True, the adapters are merged into the result.
        """
        raise AttributeError(f"{type(self).__name__} has no adapters")

    def reset_adapters(self) -> None:
        """Initialize the layer's adapters, which are not in the model's checkpoint."""


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return ``list(module.modules())``, but compute the list much faster. Decoding needs the list for every prompt."""
    found: dict[nn.Module, None] = {}

    def add(current: nn.Module) -> None:
        found[current] = None
        for child in current._modules.values():
            if child is not None and child not in found:
                add(child)

    add(module)
    return list(found)


def layers_of(module: nn.Module) -> Iterator[Layer]:
    """Iterate over all `Layer` objects in a module, including the module itself, in the order of ``modules()``."""
    return (layer for layer in modules_of(module) if isinstance(layer, Layer))


def routed_layers(module: nn.Module) -> list[Layer]:
    """Return every `Layer` in a module that routes tokens to experts, in the order of ``modules()``."""
    return [layer for layer in layers_of(module) if layer.router is not None]


def named_layers(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, Layer]]:
    """Return every `Layer` in a module with its name, in the order of ``named_modules(remove_duplicate=...)``."""
    modules = module.named_modules(remove_duplicate=remove_duplicate)
    return [(name, layer) for name, layer in modules if isinstance(layer, Layer)]


def named_linears(blocks: nn.Module) -> dict[str, tuple[Layer, str, Any]]:
    """Return the layers in a model's blocks whose products may be in float8 (`Layer.linears`), by path in the model.

    Each value is the parent of the layer, the name of the layer in its parent, and the layer.
    """
    return {
        f"layers.{path}.{name}": (layer, name, getattr(layer, name))
        for path, layer in named_layers(blocks)
        for name in layer.linears
    }


def draw(module: nn.Module, std: float) -> bool:
    """Call `Layer.draw` if the module has it, and return whether the module's own parameters are now initialized."""
    return isinstance(module, Layer) and module.draw(std)


def set_policy(module: nn.Module, policy: str) -> None:
    """Choose what the layers of a module recompute in the backward; ``policy`` is one of `CHECKPOINTING_POLICIES`."""
    for layer in layers_of(module):
        layer.set_policy(policy)


def wide_parameters(module: nn.Module) -> list[str]:
    """Return the names of all parameters of a module that stay in fp32; see `Layer.wide`."""
    return [f"{path}.{name}".lstrip(".") for path, layer in named_layers(module) for name in layer.wide]


def is_replayable(module: nn.Module) -> bool:
    """Whether a module can be recomputed as a whole."""
    return all(layer.replayable for layer in layers_of(module))


def sum_bytes(module: nn.Module) -> int:
    """Return the bytes of sums in fp32 of the gradients of all parameters of a module."""
    trained = (parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return sum(trained) * torch.float32.itemsize
