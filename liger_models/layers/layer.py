"""The base class of layers. Generic code calls its methods instead of checking classes."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups

CHECKPOINTING_POLICIES = ("none", "selective", "full")


class AttentionSpec(NamedTuple):
    """The requirements of an attention layer on the model, and its cost.

    Attributes:
        cache_slot: index of the layer's keys and values in the decode cache; None for a layer without keys and values.
        rotary: name of the rotary embedding that rotates queries and keys; None for no rotation.
        window: number of tokens that a token attends to, itself included; None for all.
        needs_mask: whether the kernel needs a mask even for plainly causal attention (softcaps).
        pair_flops: floating-point operations of the forward per pair of a query and a visible key.
        needs_flash: whether plainly causal attention needs a mask on accelerators unless it runs in half precision
            (sinks).
        takes_pages: whether keys and values may be pages of a `PagedCache` in a decoding step, as `attention` allows.
    """

    cache_slot: int | None
    rotary: str | None
    window: int | None
    needs_mask: bool
    pair_flops: int
    needs_flash: bool = False
    takes_pages: bool = False


class Layer(nn.Module):
    """A module that defines its recomputation, its sharding and the initialization of its weights.

    The defaults suit a layer that has no parameters and recomputes nothing. A module that is not a `Layer` is treated
    by the defaults, except where that would silently give wrong results: `apply_tp` rejects parameters whose gradients
    would not be summed.
    """

    replayable: bool = True
    """False if a second forward may give a different result (routed experts). Blocks with such a layer are not
    recomputed as a whole."""
    needs_bounds: bool = False
    """True if the layer reads `BatchLayout.bounds`, the boundaries of packed documents."""
    batch_invariant: bool = True
    """False if the result for a token depends on other rows of the batch even within
    `liger_models.kernels.matmul.batch_invariance.batch_invariant`."""
    needs_images: bool = False
    """True if text without images skips the layer."""
    active_share: float = 1.0
    """Fraction of the layer's own parameters that are active for a token (routed experts: top_k / experts)."""
    token_flops: int = 0
    """Floating-point operations of the forward per token, besides the products with weights and `attention`."""
    adapted: tuple[str, ...] = ()
    """Names of the layer's own parameters that have adapters, which its submodule ``lora`` holds; see
    `adapted_weight`."""
    linears: tuple[str, ...] = ()
    """Names of the linear layers whose products may be computed in another dtype (float8)."""
    router: nn.Module | None = None
    """The module that routes tokens to experts, if there is one: a linear layer, or more."""
    top_k: int = 0
    """Number of experts that a token passes through, in a layer with a router."""
    switch_length: int | None = None
    """Length beyond which a rotary embedding changes all frequencies, also of cached keys; None if it never does."""
    groups: ParallelGroups = ParallelGroups()
    """The process groups that the layer is distributed over."""

    @property
    def attention(self) -> AttentionSpec | None:
        """The requirements of a self-attention layer over the text; None for other layers."""
        return None

    def set_policy(self, policy: str) -> None:
        """Choose what the layer recomputes in the backward, by one of `CHECKPOINTING_POLICIES`."""

    def set_attention_dropout(self, probability: float) -> None:
        """Set the probability of dropping an attention weight in training; other layers ignore it."""

    def recomputed_share(self, policy: str) -> float | None:
        """Fraction of the forward's operations that the backward repeats under a policy.

        The fraction covers the layer and its submodules, except submodules that return a fraction themselves. None
        means that the layer repeats nothing on its own, and everything if its whole block is recomputed.
        """
        return None

    def can_shard(self, size: int) -> bool:
        """Whether the layer can be split into ``size`` equal shards."""
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """Turn the layer into this rank's shard (tensor parallelism).

        Args:
            group: the process group to shard over.

        Returns:
            A map from the name of each sharded parameter, relative to the layer, to the dimension along which it is
            sharded. All other parameters are replicated.

        Raises:
            ValueError: the layer cannot be split into equal shards.
        """
        return {}

    def shard_experts(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the experts of a layer with a router (expert parallelism), with arguments as in `shard`."""
        return {}

    def shard_tokens(self, group: Group) -> None:
        """Expect 1 / R of the tokens of every sequence from now on (context parallelism).

        Args:
            group: the process group that shares the tokens.

        Raises:
            ValueError: the heads cannot be divided equally among the ranks.
        """

    def sum_gradients(self, group: Group) -> bool:
        """Sum the gradients of replicated parameters over ranks with different tokens (sequence parallelism).

        Args:
            group: the process group that shares the tokens.

        Returns:
            Whether these gradients are summed, by this method or by `shard`.
        """
        return False

    def draw(self, std: float) -> bool:
        """Initialize the layer's own parameters; ``std`` is the config's ``initializer_range``.

        Returns:
            Whether the layer has initialized them. If not, its ``reset_parameters`` is called after those of its
            submodules.
        """
        return False

    def choose(self, router_logits: Tensor) -> Tensor:
        """The experts [N, K] int64 that a layer with a router chooses for router logits [N, X]."""
        raise AttributeError(f"{type(self).__name__} has no router")

    def adapted_weight(self, name: str, *, merge: bool) -> Tensor:
        """The parameter ``name`` of `adapted`, as in a plain layer, with its adapters merged or without them."""
        raise AttributeError(f"{type(self).__name__} has no adapters")

    def reset_adapters(self) -> None:
        """Initialize the layer's adapters, which the checkpoint of the model does not contain."""


def layers_of(module: nn.Module) -> Iterator[Layer]:
    """Every `Layer` in a module, including itself, in the order of ``modules()``."""
    return (layer for layer in module.modules() if isinstance(layer, Layer))


def routed_layers(module: nn.Module) -> list[Layer]:
    """Every `Layer` in a module that routes tokens to experts, in the order of ``modules()``."""
    return [layer for layer in layers_of(module) if layer.router is not None]


def named_layers(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, Layer]]:
    """Every `Layer` in a module, with its name, in the order of ``named_modules(remove_duplicate=...)``."""
    modules = module.named_modules(remove_duplicate=remove_duplicate)
    return [(name, layer) for name, layer in modules if isinstance(layer, Layer)]


def draw(module: nn.Module, std: float) -> bool:
    """Initialize a module's own parameters by `Layer.draw`, and return whether that initialized them."""
    return isinstance(module, Layer) and module.draw(std)


def set_policy(module: nn.Module, policy: str) -> None:
    """Choose what the layers of a module recompute in the backward, by one of `CHECKPOINTING_POLICIES`."""
    for layer in layers_of(module):
        layer.set_policy(policy)


def is_replayable(module: nn.Module) -> bool:
    """Whether a module can be recomputed as a whole."""
    return all(layer.replayable for layer in layers_of(module))
