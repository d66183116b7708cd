"""Options that select which parts of a model run on fused kernels. Checkpoints do not record these options."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """For each part of a model, choose a fused kernel (True), or plain PyTorch for debugging and comparison (False).

    Args:
        rms_norm: RMSNorms and the linear layers after them. The fused kernels do not save the normalized activations.
        layer_norm: LayerNorms and the linear layers after them. The fused kernels do not save the normalized
            activations, either.
        rope: the rotary embedding of the packed QKV projection.
        swiglu: the MLP's activation, for all activation functions, with or without a gate.
        linear_attention: the recurrence of linear attention, its convolution and its gated norm.
        cross_entropy: the loss, computed from all logits.
        fused_linear_cross_entropy: head and loss in one op, which never stores all logits at once.

    Raises:
        ValueError: both ``cross_entropy`` and ``fused_linear_cross_entropy`` are True.
    """

    rms_norm: bool = True
    layer_norm: bool = True
    rope: bool = True
    swiglu: bool = True
    linear_attention: bool = True
    cross_entropy: bool = False
    fused_linear_cross_entropy: bool = True

    def __post_init__(self) -> None:
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise ValueError(
                "KernelOptions: cross_entropy and fused_linear_cross_entropy exclude each other, got both. "
                "Switch one off."
            )
