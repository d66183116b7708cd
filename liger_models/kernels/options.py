"""Which parts of a model run on fused kernels: the caller's choice, not the checkpoint's."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Each part on its fused kernel (True) or in plain torch (False), for debugging and comparison.

    Args:
        rms_norm: RMSNorms, and the linear layers after them, for which no normed activations are saved.
        layer_norm: LayerNorms, likewise.
        rope: rotary embedding on the packed QKV projection.
        swiglu: the activation of the MLP, gated or not, whatever its function.
        linear_attention: the recurrence of linear attention, its convolution and its gated norm.
        cross_entropy: loss on logits that are built in full.
        fused_linear_cross_entropy: head and loss in one, without building the logits.

    Raises:
        ValueError: both losses are asked for.
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
