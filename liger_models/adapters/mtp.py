"""Multi-token prediction with a block that predicts the token after the next token.

Let e_t be the embedding of token t, and h_t the normalized output of the model's last block::

    u_t = W · [norm_e(e_{t + 1}), norm_h(h_t)],   h'_t = norm(block(u))_t
    loss = L + loss_weight · L'

L is the model's own loss. For L', the model's head predicts from h'_t the token that is two positions after t. L' is
the mean cross entropy over all tokens t for which this target is in the same document and is not ignored. Training does
not materialize the logits.

The block has the same structure as one of the model's own blocks: a block with full attention in Qwen3.5, and a block
with experts in DeepSeek V3. The block can also draft tokens: `LigerMTP` can be the ``draft_model`` of
`CausalLM.generate` and `CausalLM.rollout`.

Source: https://arxiv.org/abs/2412.19437.
"""

import copy
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.adapters.lora_layers import adapted_layers
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.files import as_dtype, some
from liger_models.convert.format import format_of
from liger_models.convert.weight_map import Expression, Name
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy
from liger_models.kernels.matmul.row_linear import inference_linear
from liger_models.kernels.norm.embed_norms import embed_norms
from liger_models.kernels.norm.row_norm import MAX_TILE
from liger_models.layers.batch import BatchLayout
from liger_models.layers.decoder import take_cu_seqlens
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.head_request import check_num_items
from liger_models.layers.layer import layers_of, wide_parameters
from liger_models.layers.linear import is_sharded
from liger_models.layers.lm_head import LossFunction
from liger_models.layers.norm import LigerRMSNorm

CHUNK = 2048
"""Number of tokens whose logits `LigerMTP.acceptance` computes at a time."""


class MTPOutput(NamedTuple):
    """Result of `LigerMTP.forward`.

    Attributes:
        loss: [] fp32.
        base_loss: [] fp32, L, the model's own loss, without gradient.
        mtp_loss: [] fp32, L', the loss of the block, without gradient.
        aux_loss: [] auxiliary loss of the model's mixtures of experts. It is part of ``loss``. None for a dense model.
    """

    loss: Tensor
    base_loss: Tensor
    mtp_loss: Tensor
    aux_loss: Tensor | None = None


def embeds_with_norms(embedding: nn.Module, *norms: nn.Module) -> bool:
    """Whether the op `embed_norms` can compute the embedding and the norms.

    The caller must ensure that all norms have the same ``eps``, ``offset`` and ``scale_in_fp32``.
    """
    return (
        type(embedding) is LigerEmbedding
        and embedding.scale is None
        and embedding.vocab_shard is None
        and all(type(norm) is LigerRMSNorm and norm.kernel and norm.weight is not None for norm in norms)
        and embedding.embedding_dim <= MAX_TILE
    )


def _seams(parents: Tensor, cu_seqlens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the indices of two tokens for each document that continues a parent: the last token of the parent, and the
    first token of the document. Documents without tokens are left out.

    Args:
        parents, cu_seqlens: as in `Decoder.forward`.
        size: number of tokens in the batch.
    """
    bounds = cu_seqlens.long().clamp(max=size)
    has_tokens = bounds.diff() > 0
    children = ((parents >= 0) & has_tokens & has_tokens[parents]).nonzero()[:, 0]
    return bounds[parents[children] + 1] - 1, bounds[children]


class LigerMTP(nn.Module):
    """A model and its multi-token prediction block. ``model`` can still be used by itself.

    The forward computes two losses: the model's own loss L for the next token, and the block's loss L' for the token
    after the next token.

    The weights of the block come from the checkpoint that the model was loaded from. If the checkpoint has no weights
    of the block, they are initialized as in a new model. Once this object exists, ``model.save_pretrained`` also writes
    the current weights of the block. The block uses the checkpointing policy of the model's last block
    (`Decoder.set_checkpointing`).

    Args:
        model: a model whose weights are loaded, and whose family has such a block (Qwen3-Next, Qwen3.5, DeepSeek V3,
            GLM-4.5 to 4.7, Nemotron 3). This module can be wrapped by `torch.nn.parallel.DistributedDataParallel`;
            sharding is not supported.
        loss_weight: weight of L'. A schedule may change this attribute.
        detached: whether L' trains only the block, and not the model (including its embedding and head).

    Raises:
        ValueError: the model belongs to another family, has no weights yet, or has an adapter on its head; or the
            block's tensors in the checkpoint do not form exactly one block.
    """

    def __init__(self, model: CausalLM, *, loss_weight: float = 0.1, detached: bool = False) -> None:
        super().__init__()
        config, mtp_format = model.config, format_of(type(model)).mtp
        if mtp_format is None:
            raise ValueError(
                "LigerMTP: model must be of a family with a multi-token prediction block, such as Qwen3.5 or "
                f"DeepSeek V3, got {type(model).__name__}. LigerMedusa takes any model."
            )
        self.format = mtp_format(config)
        if "lm_head" in adapted_layers(model):
            raise ValueError(
                "LigerMTP: the model's head must have no adapter. Call merge_lora first, or adapt other layers."
            )
        if model.device.type == "meta":
            raise ValueError("LigerMTP: the model must have weights, got one on meta. Load it first.")
        self.model, self.loss_weight, self.detached = model, loss_weight, detached

        # The block is built as the only block of a model with a tiny vocabulary.
        kept, prefix = model.current_kept_tensors(), self.format.prefix
        stored = {name: tensor for name, tensor in kept.items() if name.startswith(prefix)}
        changes: dict[str, Any] = {**self.format.sizes}
        self._sizes = replace(config, **changes, vocab_size=1, pad_token_id=None, tie_word_embeddings=False)
        predictor = type(model).from_config(self._sizes, dtype=model.dtype, device="meta", kernels=model.kernels)
        predictor.visual = None
        if not stored:
            predictor.to_empty(device=model.device)
            predictor.reset_parameters()

        # Build the norms and the projection that come before the block.
        C = config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (copy.deepcopy(predictor.norm) for _ in range(2))
        with torch.device(predictor.device):
            self.fc = nn.Linear(2 * C, C, bias=False, dtype=model.dtype)
        self.layers, self.norm = predictor.layers, predictor.norm
        self._predictor = [predictor]  # the list hides the predictor's embedding and head from `parameters`

        # In a cache, the layers of the block come after the layers of the model.
        for layer in layers_of(self.layers):
            if layer.attention is not None:
                layer.layer += config.num_hidden_layers

        # Some parameters stay in fp32. Map each of them to the dtype in which it is saved. If a checkpoint is loaded,
        # the dtypes of its tensors replace the dtypes below.
        self._wide = {f"layers.{name}": torch.float32 for name in wide_parameters(self.layers)}
        self._layout = self._layouts()[0]
        if stored:
            self._load(stored)
        else:
            nn.init.normal_(self.fc.weight, std=config.initializer_range)
        model.trained_tensors = self.tensors

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this module except the parameters of ``model``."""
        return {name: weight for name, weight in self.named_parameters() if not name.startswith("model.")}

    def _layouts(self) -> list[dict[str, tuple[Expression, dict[str, str]]]]:
        """For each checkpoint layout, map each of our parameter names to a pair.

        The pair contains the `Expression` that computes the parameter, and a dict from the names in this expression to
        the names in the checkpoint.
        """
        layouts = []
        for weights in format_of(type(self.model)).weight_maps(self._sizes):
            layout: dict[str, tuple[Expression, dict[str, str]]] = {}
            for name in self.own_parameters():
                module, _, parameter = name.rpartition(".")
                if module in self.format.names:
                    layout[name] = (Name(name), {name: f"{self.format.names[module]}.{parameter}"})
                    continue
                expression = weights.entries[name]
                parts = {theirs: theirs.partition("layers.")[2].partition(".") for theirs in expression.names()}
                layout[name] = (
                    expression,
                    {theirs: self.format.block.format(layer) + rest for theirs, (layer, _, rest) in parts.items()},
                )
            layouts.append(layout)
        return layouts

    def _load(self, stored: dict[str, Tensor]) -> None:
        """Replace the parameters with the tensors of a checkpoint."""

        def names(layout: dict[str, tuple[Expression, dict[str, str]]]) -> set[str]:
            return {theirs for _, names in layout.values() for theirs in names.values()}

        # Choose the layout that fits best, so that an error lists as few tensors as possible. Copies of the model's
        # weights are not compared, because a checkpoint may lack them.
        stored = {name: tensor for name, tensor in stored.items() if name not in self.format.copies}
        self._layout = min(self._layouts(), key=lambda layout: len(names(layout) ^ stored.keys()))
        wrong = sorted(names(self._layout) ^ stored.keys())
        if wrong:
            raise ValueError(
                "LigerMTP: the checkpoint must hold the tensors of one block with the model's sizes, got some missing "
                f"or left over: {some(wrong)}."
            )
        for name, parameter in self.own_parameters().items():
            expression, names_of = self._layout[name]
            packed = expression.pack({theirs: stored[names_of[theirs]] for theirs in expression.names()})
            if packed.shape != parameter.shape:
                raise ValueError(
                    f"LigerMTP: {', '.join(names_of.values())} must be {list(parameter.shape)} for this model, "
                    f"got {list(packed.shape)}."
                )

            # The parameter is on the meta device, so it is replaced by a new one.
            owner, _, attribute = name.rpartition(".")
            dtype = self.model.dtype
            if name in self._wide:
                self._wide[name], dtype = packed.dtype, torch.float32
            loaded = packed.to(self.model.device, dtype, copy=True).contiguous()
            setattr(self.get_submodule(owner), attribute, nn.Parameter(loaded, parameter.requires_grad))

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor,
        num_items_in_batch: Tensor | float | None = None,
        **inputs: Any,
    ) -> MTPOutput:
        """Compute the loss without materializing the logits.

        Args:
            input_ids: [B, T] int64.
            labels: [B, T] int64, unshifted; −100 is ignored.
            num_items_in_batch: number by which both summed losses are divided; by default, each loss is divided by its
                own number of targets.
            inputs: other arguments of the model's forward: ``position_ids``, ``attention_mask``, ``cu_seqlens`` (or the
                names that the collator of transformers uses for it) and, for models with images, pixels and grids.

        Raises:
            ValueError: the model is sharded; otherwise as in `Decoder.forward`.
        """
        items = num_items_in_batch

        def own(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
            check_num_items(items, target)
            share = None if items is None else self.model.groups.share_of_step(target, items)
            return linear_cross_entropy(hidden, weight, target, num_items=items).loss, share

        # If `items` counts the targets of a whole step, the auxiliary loss is weighted by this batch's share of
        # these targets.
        (base, share), mtp, aux = self.losses(input_ids, labels=labels, loss_function=own, num_items=items, **inputs)
        loss = base + self.loss_weight * mtp
        if aux is not None:
            aux = aux if share is None else share * aux
            loss = loss + aux
        return MTPOutput(loss, base.detach(), mtp.detach(), aux)

    def losses(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor,
        loss_function: LossFunction,
        num_items: Tensor | float | None = None,
        routed_experts: Tensor | None = None,
        **inputs: Any,
    ) -> tuple[Any, Tensor, Tensor | None]:
        """Compute two losses in one forward: the model's loss, with any loss function, and the block's loss L'.

        Args:
            input_ids, labels, inputs: as in `forward`.
            loss_function, routed_experts: as in `Decoder.forward`.
            num_items: number by which the summed L' is divided; None for the number of targets of L'.

        Returns:
            The result of ``loss_function``, L' [] fp32, and the auxiliary loss of the model, which is None for a dense
            model.

        Raises:
            ValueError: as in `forward`.
        """
        embeds, layout = self._prepare(input_ids, inputs)

        def both(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Any, Tensor]:
            inputs = hidden, embeds, weight
            x, e, head = (tensor.detach() for tensor in inputs) if self.detached else inputs
            second = self.hidden(x, e, layout)
            mtp: Tensor = linear_cross_entropy(second, head, layout.shift(target), num_items=num_items).loss
            return loss_function(hidden, weight, target), mtp

        # Both losses read the head's weight, so they are computed in the head's forward.
        out: Any = self.model.run(embeds, layout, labels=labels, loss_function=both, routed_experts=routed_experts)
        base, mtp = out.loss
        return base, mtp, out.aux_loss

    def _prepare(self, input_ids: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, BatchLayout]:
        model = self.model
        if model.groups.sharded is not None or is_sharded(model.embed_tokens.weight):
            raise ValueError("LigerMTP: the model must not be sharded. Use DistributedDataParallel for several GPUs.")
        inputs["cu_seqlens"] = take_cu_seqlens(inputs.get("cu_seqlens"), inputs)
        embeds, layout = model.prepare(input_ids, **inputs)
        return embeds, layout

    @torch.no_grad()
    def acceptance(self, input_ids: Tensor, *, labels: Tensor, **inputs: Any) -> Tensor:
        """Count the tokens of a text for which the block and the model itself predict the same most likely token.

        If the model itself had written the text, greedy decoding would accept the block's first draft at exactly these
        tokens.

        Args:
            input_ids, labels, inputs: as in `forward`. Tokens without a label do not count. With ``parents``, the
                first label of each document that continues a parent counts, too.

        Returns:
            [2] int64, the number of such tokens and the total number of tokens with a label.

        Raises:
            ValueError: as in `forward`.
        """
        embeds, layout = self._prepare(input_ids, inputs)
        hidden: Any = self.model.run(embeds, layout, return_logits=False).hidden_states
        drafted = self.hidden(hidden[-1], embeds, layout)
        # A draft for the token two positions ahead is compared with the token that the model chooses at the next
        # position.
        own, draft = (self._most_likely(x) for x in (hidden[-1], drafted))
        counted = layout.shift(layout.shift(labels)) != -100
        same = draft == own.roll(-1, 1)
        counts = torch.stack([(same & counted).sum(), counted.sum()])
        if inputs.get("parents") is None:
            return counts

        # The first token of a document that continues another one predicts the document's first label. The draft for
        # this label comes from the last token of the parent.
        last, first = _seams(inputs["parents"], inputs["cu_seqlens"], input_ids.numel())
        same = draft.flatten()[last] == own.flatten()[first]
        counted = layout.shift(labels).flatten()[first] != -100
        return counts + torch.stack([(same & counted).sum(), counted.sum()])

    def _most_likely(self, hidden: Tensor) -> Tensor:
        """Return the most likely tokens [B, T] for the head's inputs [B, T, C]. Computes `CHUNK` rows at a time."""
        rows = hidden.flatten(0, 1).split(CHUNK)
        return torch.cat([self.model.lm_head(x).argmax(-1) for x in rows]).view(hidden.shape[:2])

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def hidden(self, hidden: Tensor, embeds: Tensor, layout: BatchLayout) -> Tensor:
        """Compute the block's outputs h', [B, T, C]. At the last token of a document, h' has no meaning.

        Args:
            hidden: h, [B, T, C], the normalized outputs of the model's last block.
            embeds: e, [B, T, C], the embeddings of the tokens.
            layout: layout of the batch.
        """
        # Take the embedding of the next token. The last token of a document gets an unrelated embedding, but its
        # result is not used.
        return self.predict(hidden, embeds.roll(-1, 1), layout)

    def predict(self, hidden: Tensor, ahead: Tensor, layout: BatchLayout) -> Tensor:
        """Compute the block's outputs h', [B, T, C]. Unlike in `hidden`, the next tokens need not be in the batch.

        Args:
            hidden: h, [B, T, C], the normalized outputs of the model's last block.
            ahead: the embedding of each token's next token, [B, T, C].
            layout: layout of the batch. If it has a cache, the tokens are appended to the cache.
        """
        both = torch.cat([self.pre_fc_norm_embedding(ahead), self.pre_fc_norm_hidden(hidden)], -1)  # [B, T, 2 C]
        return self._run_block(both, layout)

    @torch.no_grad()
    def draft(self, hidden: Tensor, tokens: Tensor, layout: BatchLayout) -> Tensor:
        """Compute the same as `predict`, but without gradients and from token ids instead of embeddings.

        ``tokens`` [B, T] int64 holds the next token of each token.
        """
        embedding = self.model.embed_tokens
        norm: Any = self.pre_fc_norm_embedding
        other: Any = self.pre_fc_norm_hidden
        if not embeds_with_norms(embedding, norm, other) or hidden.dtype != embedding.weight.dtype:
            return self.predict(hidden, self.model.embed(tokens, None)[0], layout)
        constants = norm.eps, norm.offset, norm.scale_in_fp32
        rows = tokens.flatten(), hidden.flatten(0, 1)
        both = embed_norms(embedding.weight, *rows, norm.weight, other.weight, *constants)
        return self._run_block(both.view(*tokens.shape, -1), layout)

    def _run_block(self, both: Tensor, layout: BatchLayout) -> Tensor:
        """Compute the block's outputs h', [B, T, C], from the concatenated outputs of the two norms before the block.

        ``both`` [B, T, 2 C] holds these outputs.
        """
        u = inference_linear(both, self.fc.weight)

        # Run the block with the checkpointing policy of the model's last block.
        (predictor,) = self._predictor
        policy = self.model.checkpointing
        policy = policy if isinstance(policy, str) else policy[-1]
        if predictor.checkpointing != policy:
            predictor.set_checkpointing(policy)
        return predictor.run_blocks(u, layout)[0]

    def tensors(self, dtype: torch.dtype | str | None = None) -> dict[str, Tensor]:
        """Return copies of the block's weights in host memory, by their names in a checkpoint.

        Args:
            dtype: dtype of the tensors; None for the dtype of the weights.
        """
        chosen = self.model.dtype if dtype is None else as_dtype("tensors: dtype", dtype)
        tensors = {}
        for name, parameter in self.own_parameters().items():
            expression, names = self._layout[name]
            stored = self._wide.get(name, chosen)
            for theirs, tensor in expression.unpack(parameter.detach()).items():
                tensors[names[theirs]] = tensor.to("cpu", stored, copy=True).contiguous()
        copied = self.format.copies.keys() & self.model.kept_tensors.keys()
        for theirs in sorted(copied):
            weight = self.model.get_parameter(self.format.copies[theirs]).detach()
            tensors[theirs] = weight.to("cpu", chosen, copy=True).contiguous()
        return tensors

    def save_pretrained(
        self, folder: str | PathLike[str], *, dtype: torch.dtype | str | None = None, **options: Any
    ) -> None:
        """Write the model and its block as one Hugging Face checkpoint; see `CausalLM.save_pretrained`.

        Args:
            folder, dtype, options: as in `CausalLM.save_pretrained`.
        """
        self.model.trained_tensors = partial(self.tensors, dtype)
        try:
            self.model.save_pretrained(folder, dtype=dtype, **options)
        finally:
            self.model.trained_tensors = self.tensors
