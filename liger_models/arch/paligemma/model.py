"""PaliGemma and PaliGemma 2: model_type ``paligemma``.

The language model is Gemma, or Gemma 2 in PaliGemma 2. The vision tower is SigLIP, and a linear layer projects each of
its patches to an image token. The prefix of a document consists of all tokens before the answer: the images, the BOS
token, and the question. The tokens of the prefix attend to each other in both directions. They do so in all layers,
even if they are further apart than the attention window of the layer. The tokens of the answer attend to all tokens
before them, as in every decoder.

``token_type_ids`` are 0 in the prefix and 1 after it. transformers lets all tokens of a row attend to each other if
there are no ``token_type_ids``, the batch has no padding, and attention is "sdpa". In this case, a token also attends
to the next token, which is its own label. In this package, if ``token_type_ids`` are missing, the prefix of a document
ends before its first label. Without labels, the forward is causal, and the prompts of ``generate`` are prefixes.

Positions start at 1 in transformers and at 0 in this package. The result is the same, because attention depends only on
differences between positions.

Source: https://arxiv.org/abs/2407.07726, https://arxiv.org/abs/2412.03555, transformers ``models/paligemma``.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_models.arch._gemma.base import CappedGemmaModel
from liger_models.arch._llava.names import HUB, MODULES, Prefixes
from liger_models.arch._towers.siglip import SiglipTower, siglip_entries
from liger_models.arch.paligemma.config import IGNORED_KEYS, PaliGemmaConfig, from_json, to_json
from liger_models.arch.paligemma.processor import PaliGemmaProcessor
from liger_models.arch.registry import add_family
from liger_models.base.image_tokens import EqualImageModel
from liger_models.common.errors import check_integers, check_values
from liger_models.convert.weight_map import Expression, WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout, number_documents
from liger_models.layers.decoder import CausalLMOutput, take_cu_seqlens
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import zero_centered_norm


class PaliGemmaBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``. In PaliGemma 2, each branch also has a norm after it."""

    def __init__(self, config: PaliGemmaConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        C, norm = config.hidden_size, zero_centered_norm(config, kernels)
        scalar = config.query_pre_attn_scalar if config.has_four_norms else config.head_size
        self.input_layernorm = norm(C)
        self.self_attn = LigerAttention.from_config(
            config, layer, kernels,
            scale=scalar**-0.5, window=config.window(layer), softcap=config.attn_logit_softcapping,
        )  # fmt: skip
        # In PaliGemma 2 this norm follows the attention, and in PaliGemma it precedes the MLP.
        self.post_attention_layernorm = norm(C)
        self.pre_feedforward_layernorm = norm(C) if config.has_four_norms else None
        self.mlp = GatedMLP(C, config.intermediate_size, act="gelu_tanh", kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(C) if config.has_four_norms else None

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            return self.mlp.add_norm(self.post_attention_layernorm, x, residual)
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(self.pre_feedforward_layernorm, x, residual)
        return self.post_feedforward_layernorm(x), residual


class PaliGemmaTower(SiglipTower):
    """The vision tower and the projection, which turn images into image tokens.

    Args:
        config: sizes of the language model and the tower.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: PaliGemmaConfig, kernels: KernelOptions) -> None:
        super().__init__(config.vision_config, kernels)
        self.projection = nn.Linear(config.vision_config.hidden_size, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn pixels [n, channels, image_size, image_size] into image tokens [n · tokens, C]."""
        tokens: Tensor = self.projection(self.run_blocks(pixels))
        return tokens.flatten(0, 1)


class LigerPaliGemma(EqualImageModel, CappedGemmaModel):
    """PaliGemma with its language-model head."""

    config_class = PaliGemmaConfig
    block_class = PaliGemmaBlock
    tower_class = PaliGemmaTower
    processor_class = PaliGemmaProcessor
    prompt_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "token_type_ids")
    prompts_are_causal = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """For text with or without images, compute the logits, or the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64, with one placeholder per image token.
            pixel_values: [images, channels, height, width]; the images are in the order of their placeholders.
            token_type_ids: [B, T] integers, 0 for the tokens of the prefix and for padding, and 1 for the tokens after
                the prefix. Tokens of the prefix attend to each other in both directions. If the shape is [B, P] with P
                < T, all later tokens have type 1. Default: with ``labels``, the prefix of a document ends before its
                first label; otherwise there is no prefix. After cached tokens, ``token_type_ids`` are ignored.
            options: as in `Decoder.forward`; images need ``input_ids``.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: the number of placeholders does not match the number of image tokens; a token of type 0 follows
                a token of type 1 in a document, or has a label, which the prefix would see; otherwise as in
                `Decoder.forward`.
        """
        images = self.take_pixels(pixel_values)
        options["cu_seqlens"] = take_cu_seqlens(options.get("cu_seqlens"), options)
        cache, tokens = options.get("cache"), options.get("inputs_embeds") if input_ids is None else input_ids
        prefix = None
        if tokens is not None and tokens.dim() >= 2 and (cache is None or cache.length == 0):
            prefix = find_prefix(
                (tokens.shape[0], tokens.shape[1]), token_type_ids, options.get("labels"),
                attention_mask=options.get("attention_mask"), cu_seqlens=options["cu_seqlens"],
            )  # fmt: skip
        return self.run_with_images(input_ids, images, prefix=prefix, **options)

    def complete_inputs(self, prompts: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """See `Decoder.complete_inputs`. Without ``token_type_ids``, the whole prompt is the prefix."""
        if inputs.get("token_type_ids") is not None:
            return inputs
        return {**inputs, "token_type_ids": torch.zeros_like(prompts)}

    def tokens_of(self, pixels: Tensor | None) -> int:
        """See `EqualImageModel.tokens_of`."""
        tokens: int = self.config.tokens_per_image
        return tokens


def find_prefix(
    shape: tuple[int, int],
    token_type_ids: Tensor | None,
    labels: Tensor | None,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | None:
    """Return a mask [B, T] bool of the tokens that belong to the prefix of their document, or None if there are no such
    tokens.

    Args:
        shape: (B, T).
        token_type_ids, labels: as in `LigerPaliGemma.forward`.
        attention_mask: [B, T], 0 for padding.
        cu_seqlens: the bounds of packed documents.

    Raises:
        ValueError: ``token_type_ids`` has the wrong shape, or a token of type 0 follows a token of type 1 in its
            document or has a label.
    """
    B, T = shape
    types = labels if token_type_ids is None else token_type_ids
    if types is None:
        return None
    check_integers(**{"labels" if token_type_ids is None else "token_type_ids": types})
    if (
        types.dim() != 2
        or types.shape[0] != B
        or types.shape[1] > T
        or (token_type_ids is None and types.shape[1] != T)
    ):
        raise ValueError(f"forward: token_type_ids and labels must be [{B}, {T}], got {list(types.shape)}.")

    # Find the tokens after a prefix. Padding is neither before nor after the prefix.
    if token_type_ids is None:
        after = types != -100
    else:
        after = torch.nn.functional.pad(types, (0, T - types.shape[1]), value=1) != 0
    if attention_mask is not None and attention_mask.dim() == 2:
        after = after & (attention_mask[:, -T:] != 0).to(after.device)

    # A token is in the prefix if neither the token nor an earlier token of its document is after the prefix. ``count``
    # is the number of tokens after the prefix, from the start of the document up to each token.
    count = after.cumsum(1)
    if cu_seqlens is not None:
        documents = number_documents(cu_seqlens, B, T, after.device)[0]
        begins = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        count = count - (count - after.long()).where(begins, 0).cummax(1).values
    prefix = count == 0
    if token_type_ids is not None:
        padding = torch.zeros_like(after) if attention_mask is None else (attention_mask[:, -T:] == 0).to(after.device)
        check_values(
            (prefix | after | padding).all(),
            "forward: token_type_ids must be 0 in the prefix of each document and 1 after it, got 0 after 1. Pass what "
            "the processor returns, and the bounds of packed documents as cu_seqlens.",
        )
    if token_type_ids is not None and labels is not None and labels.shape == prefix.shape:
        check_values(
            ~(prefix & ~padding & (labels != -100)).any(),
            "forward: labels must be -100 where token_type_ids are 0, because these tokens attend to each other, got "
            "labels there. Let token_type_ids be 1 from the first label on, or leave them out.",
        )
    return prefix


def weight_map(config: PaliGemmaConfig) -> WeightMap:
    """Maps the parameters of PaliGemma to the tensors of a Hugging Face checkpoint."""
    return _map(config, HUB, ".vision_model")


def other_maps(config: PaliGemmaConfig) -> list[WeightMap]:
    """Return further weight maps: first for the tensor names in checkpoints that transformers 5 writes, then for the
    names of transformers' modules since version 4.52."""
    return [_map(config, HUB, ""), _map(config, MODULES, ""), _map(config, MODULES, ".vision_model")]


def _map(config: PaliGemmaConfig, names: Prefixes, level: str) -> WeightMap:
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.has_four_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tower: dict[str, Expression | str] = siglip_entries(config.vision_config, f"{names.tower}{level}")
    projector = f"{names.top}multi_modal_projector.linear"
    return decoder_map(
        config,
        norms=norms,
        prefix=names.text,
        head=names.head,
        also=tower | {f"visual.projection.{k}": f"{projector}.{k}" for k in ("weight", "bias")},
    )


add_family(
    LigerPaliGemma,
    model_type="paligemma",
    hf_class="PaliGemmaForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
