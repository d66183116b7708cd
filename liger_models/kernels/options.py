"""Which parts of a model run on fused kernels. The caller chooses them; a checkpoint does not record them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Whether each part runs on its fused kernel (True) or in plain torch (False, for debugging and comparison).

    Args:
        rms_norm: RMSNorms and the linear layers after them, without saving normed activations.
        layer_norm: LayerNorms, likewise.
        rope: rotary embedding on the packed QKV projection.
        swiglu: the MLP's activation, gated or not, with any activation function.
        linear_attention: the recurrence of linear attention, its convolution and its gated norm.
        cross_entropy: the loss on logits that are held in full.
        fused_linear_cross_entropy: head and loss in one op, which never holds all logits.

    Raises:
        ValueError: both losses are True.
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
