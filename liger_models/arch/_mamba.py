"""The keys in config.json and the tensor names in checkpoints that all families with `LigerMamba2` share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from liger_models.convert.weight_map import Cat, Expression, Rearrange, Split, WeightMap, attention_rows, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.mamba2 import LigerMamba2, StateDecay


@dataclass(frozen=True, kw_only=True)
class MambaHybridConfig(RMSNormDecoderConfig):
    """The config of a decoder with state-space mixers. The mixers' keys in config.json begin with ``mamba_``.

    ``time_step_limit`` holds the smallest step size, optionally followed by the largest step size. If
    ``time_step_limit`` is None, step sizes are not limited.

    Raises:
        ValueError: the sizes of the mixer are inconsistent.
    """

    mamba_n_heads: int = 128
    mamba_d_head: int | None = None
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = self.mamba_n_heads * self.mixer_sizes[1]
        if inner != self.mixer_width:
            raise ValueError(
                f"{type(self).__name__}: mamba_n_heads times mamba_d_head ({inner}) must equal the width of the mixer "
                f"({self.mixer_width}). Check config.json."
            )

    @property
    def mixer_width(self) -> int:
        """Inner width of the mixer: the number of channels of all its heads."""
        return self.mamba_expand * self.hidden_size

    @property
    def mixer_sizes(self) -> tuple[int, int, int, int]:
        """The mixer's number of heads, head dimension, number of groups, and state size."""
        head_dim = self.mixer_width // self.mamba_n_heads if self.mamba_d_head is None else self.mamba_d_head
        return self.mamba_n_heads, head_dim, self.mamba_n_groups, self.mamba_d_state


def build_mixer(config: MambaHybridConfig, layer: int, kernels: KernelOptions, **options: Any) -> LigerMamba2:
    """Build the mixer of a layer; ``options`` are further arguments of `LigerMamba2`."""
    return LigerMamba2(
        config.hidden_size,
        *config.mixer_sizes,
        config.mamba_d_conv,
        layer=layer,
        eps=config.rms_norm_eps,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
        limits=limits_of(config.time_step_limit),
        kernel=kernels.linear_attention,
        **options,
    )


def read_mixer(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``time_step_limit``, in which infinity may be written in two ways, and ``mamba_d_head``, which may be
    "auto"."""
    flat = {key: value for key, value in hf.items() if (key, value) != ("mamba_d_head", "auto")}
    return {**flat, "time_step_limit": read_limits(hf.get("time_step_limit"))}


def write_mixer(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `read_mixer`: write both limits of the step size, and "auto" if ``mamba_d_head`` is None."""
    head_dim = keys.get("mamba_d_head")
    limits = [*limits_of(keys.get("time_step_limit"))]
    return {**keys, "time_step_limit": limits, "mamba_d_head": "auto" if head_dim is None else head_dim}


IGNORED_MIXER_KEYS = (
    "layers_block_type",  # computed from other keys
    "mamba_chunk_size",  # only sets the chunk length in kernels
    "num_logits_to_keep",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
)


def _by_unit(name: str, parts: Mapping[str, int], units: int) -> Expression:
    """Reorder the rows of a checkpoint tensor so that the rows of each unit are adjacent; see `LigerMamba2.units_of`.

    ``parts`` maps the name of each part of the tensor to the part's number of rows per unit.
    """
    groups = [Rearrange("(u n) ... -> u n ...", part, u=units) for part in parts]
    rows = Rearrange("u n ... -> (u n) ...", Cat(groups, dim=1, sizes=[*parts.values()]), u=units)
    return Split(name, 0, {part: units * size for part, size in parts.items()}, rows)


def mixer_entries(
    ours: str,
    theirs: str,
    sizes: tuple[int, int, int, int],
    *,
    bias: bool,
    conv_bias: bool,
    out_bias: bool | None = None,
    norm: bool = True,
) -> dict[str, Expression | str]:
    """Return the entries of a weight map for a `LigerMamba2`.

    Args:
        ours, theirs: the prefixes of the names in this package and in the checkpoint.
        sizes: number of heads, head dimension, number of groups, and state size.
        bias, conv_bias: whether the projections and the convolution have biases.
        out_bias: whether the output projection has a bias; None means the same as ``bias``.
        norm: whether the mixer has a norm.
    """
    units, rows = LigerMamba2.units_of(*sizes)
    parts = dict(zip(("gate", "value", "B", "C", "step"), rows, strict=True))
    channels = {name: parts[name] for name in ("value", "B", "C")}
    same = ["out_proj.weight"]
    same += ["out_proj.bias"] if (bias if out_bias is None else out_bias) else []
    same += ["norm.weight"] if norm else []
    entries: dict[str, Expression | str] = {f"{ours}.{name}": f"{theirs}.{name}" for name in same}
    entries |= {f"{ours}.decay.{name}": f"{theirs}.{name}" for name in StateDecay.wide}
    for parameter in ("weight", "bias") if bias else ("weight",):
        entries[f"{ours}.in_proj.{parameter}"] = _by_unit(f"{theirs}.in_proj.{parameter}", parts, units)
    for parameter in ("weight", "bias") if conv_bias else ("weight",):
        entries[f"{ours}.conv_{parameter}"] = _by_unit(f"{theirs}.conv1d.{parameter}", channels, units)
    return entries


def hybrid_map(
    config: Any, norms: Sequence[str], mlps: Mapping[str, Expression | str], last_norm: str = "model.norm.weight"
) -> WeightMap:
    """Return the weight map of a decoder whose layers have either attention or a state-space mixer.

    Args:
        config: config of the model, a `MambaHybridConfig` with ``has_attention``.
        norms: names of the norms of a block.
        mlps: the weight-map entries of the MLPs.
        last_norm: name of the weight of the last norm.
    """
    full, mamba = "model.layers.{full}.self_attn", "model.layers.{mamba}.mamba"
    also: dict[str, Expression | str] = {}
    for parameter in ("weight", "bias") if config.attention_bias else ("weight",):
        also["layers.{full}.self_attn.qkv_proj." + parameter] = attention_rows(full, parameter, config)
        also["layers.{full}.self_attn.o_proj." + parameter] = f"{full}.o_proj.{parameter}"
    also |= mixer_entries(
        "layers.{mamba}.mamba", mamba, config.mixer_sizes, bias=config.mamba_proj_bias, conv_bias=config.mamba_conv_bias
    )
    layers = range(config.num_hidden_layers)
    shared = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return decoder_map(
        config,
        norms=norms,
        instead={f"{name}.weight": None for name in shared},  # None removes an entry of `decoder_map`
        also={**also, **mlps, "norm.weight": last_norm},
        over={
            "full": [i for i in layers if config.has_attention(i)],
            "mamba": [i for i in layers if not config.has_attention(i)],
        },
    )


def read_limits(limits: Sequence[Any] | None) -> list[float] | None:
    """Read ``time_step_limit`` from config.json. The result is None for the limits (0, infinity), because config fields
    hold only values that JSON can express.

    Transformers 5 writes infinity as ``{"__float__": "Infinity"}``, and older versions write ``Infinity``.

    Raises:
        ValueError: the value is not a pair of numbers.
    """
    if limits is None:
        return None
    numbers = [float(limit["__float__"]) if isinstance(limit, Mapping) else float(limit) for limit in limits]
    if len(numbers) != 2 or any(math.isnan(number) for number in numbers):
        raise ValueError(f"config.json: time_step_limit must be two numbers, got {limits}. Check config.json.")
    least, most = numbers
    if most == math.inf:
        return None if least == 0 else [least]
    return numbers


def limits_of(limits: list[float] | None) -> tuple[float, float]:
    """Return the smallest and the largest allowed step size; ``limits`` is a result of `read_limits`."""
    least, *most = limits or [0.0]
    return least, most[0] if most else math.inf
