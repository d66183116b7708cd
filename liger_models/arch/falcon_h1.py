"""Falcon-H1 0.5B to 34B: model_type ``falcon_h1``.

Differs from Llama: each layer has a state-space mixer (`LigerMamba2`) and attention side by side. The mixer and
attention read the same normalized residual stream. Many tensors are multiplied by constants: the embeddings, the inputs
and outputs of the mixer and of attention, the keys, the parts of the mixer's projection, the gate and the output of the
MLP, and the logits. As in transformers, ``inputs_embeds`` that the caller passes are not scaled. Without
``mamba_rms_norm``, the mixer has a gate but no norm.

Unlike in transformers, padding does not change the result: for padding tokens, the biases of the projection and of the
convolution do not enter the state. Step sizes are also limited in cached decoding; transformers 5.23 limits them only
while it processes a prompt.

Source: https://arxiv.org/abs/2507.22448, transformers ``models/falcon_h1``.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from liger_models.arch._mamba import (
    IGNORED_MIXER_KEYS,
    MambaHybridConfig,
    build_mixer,
    mixer_entries,
    read_mixer,
    write_mixer,
)
from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import Expression, WeightMap, decoder_map, gate_up_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(MambaHybridConfig):
    """Sizes and constants of a Falcon-H1 model.

    Raises:
        ValueError: the multiplier of a branch's input is not 1, but the branch's projection has a bias, which must not
            be scaled.
    """

    vocab_size: int = 128000
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    mamba_d_ssm: int | None = 1024
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    projectors_bias: bool = False
    lm_head_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    mlp_multipliers: list[float] = field(default_factory=lambda: [1.0] * 2)
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_multipliers: list[float] = field(default_factory=lambda: [1.0] * 5)
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            numbers = getattr(self, name)
            if len(numbers) != size:
                raise ValueError(f"FalconH1Config: {name} must hold {size} numbers, got {numbers}. Check config.json.")
        for bias, multiplier in (
            ("attention_bias", "attention_in_multiplier"),
            ("mamba_proj_bias", "ssm_in_multiplier"),
        ):
            if getattr(self, bias) and getattr(self, multiplier) != 1:
                raise ValueError(
                    f"FalconH1Config: {multiplier} must be 1 with {bias}, got {getattr(self, multiplier)}. No released "
                    "model has both."
                )

    @property
    def mixer_width(self) -> int:
        """Inner width of the mixer: the number of channels of all its heads."""
        return super().mixer_width if self.mamba_d_ssm is None else self.mamba_d_ssm


class FalconH1Block(nn.Module):
    """``u = norm(h); h += s · mixer(u) + a · attention(u); h += mlp(norm(h))``.

    The constants ``s`` and ``a`` multiply the outputs of the mixer and of attention. The model has two further
    constants: ``c`` for the input of attention, and ``κ`` for the keys. This class leaves the input and the keys
    unchanged. It multiplies the attention scores by ``c² · κ`` and the result of attention by ``c`` instead, which has
    the same effect.
    """

    def __init__(self, config: FalconH1Config, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        input_scale = config.attention_in_multiplier
        self.mixer_scale = config.ssm_out_multiplier
        self.attention_scale = config.attention_out_multiplier * input_scale
        self.input_layernorm = norm()
        gate, value, B, C, step = (config.ssm_in_multiplier * number for number in config.ssm_multipliers)
        self.mamba = build_mixer(
            config,
            layer,
            kernels,
            out_bias=config.projectors_bias,
            gate_first=not config.mamba_norm_before_gate if config.mamba_rms_norm else None,
            multipliers=(gate, value, B, C, step),
        )
        self.self_attn = LigerAttention.from_config(
            config,
            layer,
            kernels,
            scale=config.head_size**-0.5 * config.key_multiplier * input_scale**2,
        )
        self.pre_ff_layernorm = norm()
        self.feed_forward = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        attended, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        mixed, residual = self.mamba.add_norm(self.input_layernorm, None, residual, layout)
        mixed = mixed if self.mixer_scale == 1.0 else mixed * self.mixer_scale
        x = torch.add(mixed, attended, alpha=self.attention_scale)
        return self.feed_forward.add_norm(self.pre_ff_layernorm, x, residual)


class LigerFalconH1(CausalLM):
    """Falcon-H1 with its language-model head."""

    config_class = FalconH1Config
    block_class = FalconH1Block

    def build_head(self, config: FalconH1Config) -> LigerLMHead:
        """A head whose logits are multiplied by ``lm_head_multiplier``."""
        return LigerLMHead(
            config.hidden_size, config.vocab_size, logit_scale=config.lm_head_multiplier, kernels=self.kernels
        )

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[Tensor, tuple[int, int]]:
        """See `Decoder.embed`. The embeddings of ``input_ids`` are scaled, but ``inputs_embeds`` are not."""
        embeds, shape = super().embed(input_ids, inputs_embeds)
        scale = 1.0 if input_ids is None else self.config.embedding_multiplier
        return embeds if scale == 1.0 else embeds * scale, shape


def weight_map(config: FalconH1Config) -> WeightMap:
    """Maps the parameters of Falcon-H1 to the tensors of a Hugging Face checkpoint."""
    ours, theirs = "layers.{i}", "model.layers.{i}"
    mlp = f"{theirs}.feed_forward"
    also: dict[str, Expression | str] = {"norm.weight": "model.final_layernorm.weight"}
    for parameter in ("weight", "bias") if config.mlp_bias else ("weight",):
        gate, up = (f"{mlp}.{part}_proj.{parameter}" for part in ("gate", "up"))
        also[f"{ours}.feed_forward.gate_up_proj.{parameter}"] = gate_up_rows(gate, up)
        also[f"{ours}.feed_forward.down_proj.{parameter}"] = f"{mlp}.down_proj.{parameter}"
    also |= mixer_entries(
        f"{ours}.mamba", f"{theirs}.mamba", config.mixer_sizes, bias=config.mamba_proj_bias,
        out_bias=config.projectors_bias, conv_bias=config.mamba_conv_bias, norm=config.mamba_rms_norm,
    )  # fmt: skip
    return decoder_map(
        config,
        norms=("input_layernorm", "pre_ff_layernorm"),
        instead={"mlp.gate_up_proj.weight": None, "mlp.down_proj.weight": None},
        also=also,
    )


IGNORED_KEYS = (
    *IGNORED_MIXER_KEYS,
    "attn_layer_indices",  # every layer has attention
    "mamba_use_mlp",  # every layer has an MLP
)

add_family(
    LigerFalconH1,
    model_type="falcon_h1",
    hf_class="FalconH1ForCausalLM",
    weight_map=weight_map,
    from_json=read_mixer,
    to_json=write_mixer,
    ignored_keys=IGNORED_KEYS,
    module="model.final_layernorm",
)
