"""Medusa: additional heads that predict the tokens after the next token, for speculative decoding.

Let h be the last hidden states. Head 0 is the model's own head, which predicts the next token. For k from 1 to K, head
k predicts the token that is k + 1 positions ahead::

    p_k = softmax(W_k · block(... block(h))),  block(x) = x + SiLU(A · x + b)
    loss = [L_0 +] heads_weight · Σ decay^k · L_k

L_k is the mean cross entropy of head k over all tokens that have a target: the token k + 1 positions ahead must be
in the same document and must not be ignored. The loss includes L_0 only if the model itself is also trained. Training
does not materialize the logits. The parameters A and b are initialized to 0. W_k is initialized to a copy of the
model's own head.

Source: https://arxiv.org/abs/2401.10774
"""

import itertools
import shutil
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.adapters.lora_layers import adapted_layers, adapters_of
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.files import CONFIG, read_json_config, write_json
from liger_models.convert.folder import write_folder
from liger_models.distributed.ranks import raise_on_all_ranks, rank
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy
from liger_models.layers.batch import BatchLayout
from liger_models.layers.decoder import take_cu_seqlens
from liger_models.layers.head_request import check_num_items
from liger_models.layers.linear import is_sharded
from liger_models.layers.lm_head import LigerLMHead

HEADS = "medusa_lm_head.safetensors"
"""Name of the file with the weights of the heads."""
IGNORED = -100


class MedusaOutput(NamedTuple):
    """Result of `LigerMedusa.forward`. Values that were not computed are None.

    Attributes:
        loss: [] fp32.
        base_loss: [] L_0, the loss of the model's own head, without gradient. None if the model is frozen. Also None if
            all heads share a projection, because then only the sum of the losses is computed.
        head_losses: [K] L_1 ... L_K, the losses of the K Medusa heads, without gradient. None if all heads share a
            projection.
        aux_loss: [] auxiliary loss of mixture-of-experts layers. It is part of ``loss`` unless the model is frozen.
        log_probs: [1 + K, B, T] fp32, log-probabilities of the targets, where index 0 stands for the model's own
            head. They are 0 for tokens without a target.
        logits: [1 + K, B, T, V], where index 0 stands for the model's own head.
    """

    loss: Tensor | None = None
    base_loss: Tensor | None = None
    head_losses: Tensor | None = None
    aux_loss: Tensor | None = None
    log_probs: Tensor | None = None
    logits: Tensor | None = None


class ResidualBlock(nn.Module):
    """``x + SiLU(A · x + b)``, initialized to the identity function.

    Args:
        hidden_size: C.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., C]."""
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Sequential):
    """Residual blocks and, unless the heads share a projection, the head's own projection to the vocabulary.

    This class derives from `nn.Sequential`, so its parameters have the names that the file format requires. The
    projection must run inside the forward of this module, because FSDP gathers the projection's weight only for this
    forward.

    Args:
        hidden_size: C.
        num_layers: number of residual blocks.
        projection: the projection from [C] to [V]; None if the heads share a projection.
    """

    def __init__(self, hidden_size: int, num_layers: int, projection: LigerLMHead | None = None) -> None:
        blocks = [ResidualBlock(hidden_size) for _ in range(num_layers)]
        super().__init__(*blocks, *([] if projection is None else [projection]))
        self.num_layers = num_layers

    def forward(self, x: Tensor, *target: Tensor, **options: Any) -> Any:  # type: ignore[override]
        """Pass x [..., C] through the blocks.

        If the head has a projection, pass it the result and all other arguments.
        """
        for block in itertools.islice(self, self.num_layers):
            x = block(x)
        return self[-1](x, *target, **options) if len(self) > self.num_layers else x


class LigerMedusa(nn.Module):
    """A model with Medusa heads. The forward computes the logits or the loss of all heads.

    ``model`` can still be used by itself.

    Args:
        model: any model of this package whose weights are loaded. `apply_fsdp` may be applied to the model before this
            module is created, or to this module afterwards.
        num_heads: K, the number of Medusa heads.
        num_layers: number of residual blocks in each head.
        share_lm_head: whether the heads share the projection [V, C] of the model's own head, which saves K · V · C
            weights.
        freeze: whether to train only the Medusa heads, without the loss of the model's own head (Medusa-1). If False,
            the model is also trained (Medusa-2): all of it, or only its LoRA adapters if it has any.
        decay: the weight of head k's loss is ``decay ** k``.
        heads_weight: weight of the sum of the heads' losses. A schedule may change this attribute.

    Raises:
        ValueError: there are no heads or no blocks, ``decay`` is negative, or the model is sharded by `apply_tp` or
            `apply_cp`, has no weights yet, or has an adapter on its head.
    """

    def __init__(
        self,
        model: CausalLM,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        share_lm_head: bool = False,
        freeze: bool = True,
        decay: float = 0.8,
        heads_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if not num_heads >= 1:
            raise ValueError(f"LigerMedusa: num_heads must be at least 1, got {num_heads}.")
        if not num_layers >= 1:
            raise ValueError(f"LigerMedusa: num_layers must be at least 1, got {num_layers}.")
        if not decay >= 0:
            raise ValueError(f"LigerMedusa: decay must not be negative, got {decay}.")
        adapted = adapted_layers(model)
        if "lm_head" in adapted:
            raise ValueError(
                "LigerMedusa: the model's head must have no adapter. Call merge_lora first, or adapt other layers."
            )
        if model.groups.sharded is not None:
            raise ValueError("LigerMedusa: the model must not be sharded by apply_tp or apply_cp. Use FSDP alone.")
        if model.device.type == "meta":
            raise ValueError("LigerMedusa: the model must have weights, got one on meta. Load it first.")

        self.model, self.num_layers, self.share_lm_head = model, num_layers, share_lm_head
        self.freeze, self.decay, self.heads_weight = freeze, decay, heads_weight

        # If the model has adapters, only the adapters are trained.
        model.requires_grad_(not (freeze or adapted))
        for layer in adapted.values():
            adapters_of(layer).requires_grad_(not freeze)

        # Unless the heads share the projection of the model's own head, each head starts with a copy of it. The copy
        # has no bias, because the file format has no name for a bias.
        lm_head: Any = model.lm_head
        hidden_size = model.config.hidden_size
        scaling = {"logit_scale": lm_head.logit_scale, "softcap": lm_head.softcap}
        weight = lm_head.weight.detach()
        if is_sharded(weight) and not share_lm_head:
            weight = weight.full_tensor()
        self.heads = nn.ModuleList()
        for _ in range(num_heads):
            projection = None
            if not share_lm_head:
                with torch.device("meta"):  # the weight is replaced right away
                    projection = LigerLMHead(hidden_size, weight.shape[0], kernels=model.kernels, **scaling)
                projection.weight = nn.Parameter(weight.clone())
            self.heads.append(MedusaHead(hidden_size, num_layers, projection).to(model.device, model.dtype))

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        return_log_probs: bool = False,
        **inputs: Any,
    ) -> MedusaOutput:
        """Compute the logits of all heads, or, if ``labels`` are given, the loss without materializing the logits.

        Args:
            input_ids: [B, T] int64.
            labels: [B, T] int64, unshifted; −100 is ignored.
            num_items_in_batch: number by which each head's summed loss is divided, by default the head's number of
                targets.
            return_log_probs: whether to return the log-probabilities of the targets of all heads instead of the loss.
            inputs: other arguments of `Decoder.forward`: ``position_ids``, ``attention_mask``, ``cu_seqlens``,
                ``inputs_embeds``.

        Raises:
            ValueError: as in `Decoder.forward`.
        """
        if labels is None and return_log_probs:
            raise ValueError("LigerMedusa: return_log_probs needs labels. Pass them.")
        if "return_logits" in inputs:
            raise ValueError(
                "LigerMedusa: return_logits must not be given. Without labels all heads' logits are returned."
            )

        # Without labels, compute the logits of all heads.
        if labels is None:
            tokens = input_ids if input_ids is not None else inputs["inputs_embeds"]
            # No token has a target here. A loss function is used only to get the hidden states for the heads.
            nothing = torch.full(tokens.shape[:2], IGNORED, device=tokens.device)
            out = self.model(
                input_ids, labels=nothing, loss_function=lambda x, *_: self._hidden(x), return_logits=True, **inputs
            )
            drafts = [self.draft_logits(out.loss, index) for index in range(len(self.heads))]
            return MedusaOutput(aux_loss=out.aux_loss, logits=torch.stack([out.logits, *drafts]))

        cu_seqlens = take_cu_seqlens(inputs.get("cu_seqlens"), {**inputs})
        ahead = self.targets(labels, inputs.get("attention_mask"), cu_seqlens)  # [K, B, T]
        check_num_items(num_items_in_batch, ahead)

        # The losses are computed inside the forward of the model's head, for which FSDP gathers the head's weight.
        def loss_of_heads(x: Tensor, weight: Tensor, target: Tensor) -> MedusaOutput:
            # Compute all heads with the shared projection, or each head with its own projection.
            if return_log_probs:
                return MedusaOutput(log_probs=self._log_probs(x, weight, torch.cat([target[None], ahead])))
            if self.share_lm_head:
                return self._shared_loss(x, weight, torch.cat([target[None], ahead]), num_items_in_batch)
            hidden = self._hidden(x)
            head_losses = torch.stack(
                [
                    head(hidden, target, num_items=num_items_in_batch)[0]
                    for head, target in zip(self.heads, ahead, strict=True)
                ]
            )
            loss = (head_losses * self._weights(hidden.device)).sum()

            # If the model is frozen, the loss of its own head is not computed.
            if self.freeze:
                return MedusaOutput(loss, None, head_losses.detach())
            base = self._cross_entropy(x, weight, target, num_items=num_items_in_batch).loss
            return MedusaOutput(base + loss, base.detach(), head_losses.detach())

        out = self.model(input_ids, labels=labels, loss_function=loss_of_heads, **inputs)
        result: MedusaOutput = out.loss._replace(aux_loss=out.aux_loss)
        if result.loss is not None and out.aux_loss is not None and not self.freeze:
            result = result._replace(loss=result.loss + out.aux_loss)
        return result

    def draft_logits(self, hidden: Tensor, index: int) -> Tensor:
        """Return the logits [..., V] of the head ``index`` (0 to K − 1) for the last hidden states [..., C].

        The model's own head predicts the next token, and the head with index 0 predicts the token after that.
        """
        output: Tensor = self.heads[index](hidden)
        return self.model.lm_head(output) if self.share_lm_head else output

    def generate(self, input_ids: Any, *, max_new_tokens: int, **options: Any) -> Any:
        """Generate the same tokens as ``model.generate``, with fewer forwards, because the heads draft tokens."""
        return self.model.generate(input_ids, max_new_tokens=max_new_tokens, draft_model=self, **options)

    def targets(self, labels: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the heads' targets, [K, B, T] int64. The target of head k is the label that is k + 1 positions ahead.

        A target is −100 if it would lie past the end of the document or row.

        Args:
            labels: [B, T] int64, unshifted.
            attention_mask, cu_seqlens: as in `Decoder.forward`.
        """
        B, T = labels.shape
        layout = BatchLayout.build(
            (B, T), labels.device, {}, windows={}, attention_mask=attention_mask, cu_seqlens=cu_seqlens
        )
        # Each shift moves the labels by one more position, within their document.
        target, ahead = layout.shift(labels), []
        for _ in self.heads:
            target = layout.shift(target)
            ahead.append(target)
        return torch.stack(ahead)

    def _hidden(self, x: Tensor) -> Tensor:
        """Return the hidden states: the first C columns of ``x``, the input of the model's head.

        Further columns of ``x`` belong to the bias of the model's head.
        """
        return x[..., : self.model.config.hidden_size]

    def _rows(self, x: Tensor) -> list[Tensor]:
        """Return each head's input for the shared projection, given the input of the model's own head."""
        hidden, columns = self._hidden(x), x[..., self.model.config.hidden_size :]
        return [torch.cat([head(hidden), columns], -1) if columns.numel() else head(hidden) for head in self.heads]

    def _weights(self, device: torch.device) -> Tensor:
        """Return the weights of the heads' losses, [K] fp32."""
        powers = torch.arange(1, len(self.heads) + 1, dtype=torch.float32, device=device)
        return self.heads_weight * self.decay**powers

    def _cross_entropy(self, x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
        """Compute the cross entropy of the logits x · weightᵀ, with the softcap and the scale of the model's head."""
        head = self.model.lm_head
        return linear_cross_entropy(x, weight, target, softcap=head.softcap, logit_scale=head.logit_scale, **options)

    def _shared_loss(
        self, x: Tensor, weight: Tensor, targets: Tensor, num_items: Tensor | float | None
    ) -> MedusaOutput:
        """Compute the loss of all heads with a single cross entropy on the shared projection."""
        rows, factors = self._rows(x), self._weights(x.device)
        if self.freeze:
            targets = targets[1:]
        else:
            rows, factors = [x, *rows], torch.cat([factors.new_ones(1), factors])
        # The loss of a head is a mean over the head's targets. In the sum over all heads, the weight of a token is
        # therefore the weight of the head's loss, divided by the head's number of targets.
        counts = (targets != IGNORED).sum((1, 2)).clamp(min=1) if num_items is None else num_items
        token_weight = (factors / counts)[:, None, None].expand(targets.shape)
        loss = self._cross_entropy(torch.stack(rows), weight, targets, token_weight=token_weight, reduction="sum").loss
        return MedusaOutput(loss)

    def _log_probs(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        options: dict[str, Any] = {"reduction": "sum", "return_log_probs": True}
        if self.share_lm_head:
            rows = torch.stack([x, *self._rows(x)])  # [1 + K, B, T, C]
            log_probs: Tensor = self._cross_entropy(rows, weight, targets, **options).log_probs
            return log_probs
        base, hidden = self._cross_entropy(x, weight, targets[0], **options).log_probs, self._hidden(x)
        drafts = [head(hidden, target, log_probs=True)[0] for head, target in zip(self.heads, targets[1:], strict=True)]
        return torch.stack([base, *drafts])

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        *,
        base_model_name_or_path: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the heads in the format of the released Medusa checkpoints, without the model.

        If the model is sharded, every rank must call this method. A shared projection is written once per head, so that
        programs that read the files need not know that it is shared.

        Args:
            folder: a folder for the heads only, which is created if it does not exist.
            base_model_name_or_path: name of the model that the heads belong to, for config.json.
            dtype: dtype of the tensors in the file, by default the heads' dtype.

        Raises:
            ValueError: the folder already contains a model.
            OSError: the folder cannot be written.
        """
        folder = Path(folder).absolute()
        with raise_on_all_ranks():
            models = sorted(path.name for path in folder.glob("model*.safetensors*")) if folder.is_dir() else []
            if models:
                raise ValueError(
                    f"LigerMedusa.save_pretrained: {folder} must not hold a model, got {', '.join(models[:3])}. Choose "
                    "a folder for the heads alone."
                )
        for module in self.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:  # after an evaluation, FSDP leaves parameters gathered
                reshard()

        # A shared projection is written under the name of each head. Rank 0 keeps the gathered tensors.
        parameters: dict[str, Any] = dict(self.heads.named_parameters())
        if self.share_lm_head:
            names = [f"{k}.{self.num_layers}.weight" for k in range(len(self.heads))]
            parameters |= dict.fromkeys(names, self.model.lm_head.weight)
        tensors = {}
        for name, parameter in parameters.items():
            whole = parameter.full_tensor() if is_sharded(parameter) else parameter
            if rank() == 0:
                tensors[name] = whole.detach().to("cpu", dtype, copy=True).contiguous()
        config = {
            "model_type": "medusa",
            "medusa_num_heads": len(self.heads),
            "medusa_num_layers": self.num_layers,
            "base_model_name_or_path": base_model_name_or_path,
            "hidden_size": self.model.config.hidden_size,
            "vocab_size": self.model.config.vocab_size,
            "original_lm_head": self.share_lm_head,
        }

        def write(target: Path) -> None:
            write_json(target / CONFIG, config)
            save_file(tensors, target / HEADS, metadata={"format": "pt"})
            shutil.copymode(target / CONFIG, target / HEADS)  # safetensors creates files that only their owner can read

        with raise_on_all_ranks():
            if rank() == 0:
                write_folder(folder, write, last=CONFIG)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], model: CausalLM, **options: Any) -> "LigerMedusa":
        """Load heads in the format that `save_pretrained` writes.

        Args:
            folder: folder with ``config.json`` and ``medusa_lm_head.safetensors``.
            model: as in `LigerMedusa`. The heads get the model's device and dtype.
            options: ``freeze``, ``decay`` and ``heads_weight`` as in `LigerMedusa`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: config.json lacks the number of heads, or tensors are missing, unexpected or have the wrong
                shape.
        """
        # Read the number and the size of the heads.
        folder = Path(folder)
        config = read_json_config(folder)
        heads: Any = config.get("medusa_num_heads")
        layers: Any = config.get("medusa_num_layers", 1)
        if type(heads) is not int or type(layers) is not int:
            raise ValueError(
                f"{folder / CONFIG}: medusa_num_heads and medusa_num_layers must be integers, got {heads} and {layers}."
            )
        if not (folder / HEADS).is_file():
            raise FileNotFoundError(
                f"{folder / HEADS}: must exist, got none. Convert a medusa_lm_head.pt with torch.load and "
                "safetensors.torch.save_file; the tensors have the same names."
            )

        # Check the numbers of heads and blocks before anything is allocated. Each block of each head must have at least
        # one tensor in the file.
        with safe_open(folder / HEADS, framework="pt") as file:
            count = len(file.keys())
        if max(heads, 1) * max(layers, 1) > count:
            raise ValueError(
                f"{folder / CONFIG}: medusa_num_heads and medusa_num_layers must be those of {HEADS}, got {heads} and "
                f"{layers}, but the file has {count} tensors. Correct them."
            )

        # A shared projection belongs to the model, so the copies in the file are not read.
        shared = bool(config.get("original_lm_head", False))
        medusa = cls(model, heads, layers, share_lm_head=shared, **options)
        parameters = dict(medusa.heads.named_parameters())
        projections = {f"{k}.{layers}.weight" for k in range(heads)} if shared else set()
        with safe_open(folder / HEADS, framework="pt") as file, torch.no_grad():
            names = set(file.keys()) - projections
            if names != parameters.keys():
                raise ValueError(
                    f"{folder / HEADS}: must hold {len(parameters)} tensors such as 0.0.linear.weight, got too few, "
                    f"{sorted(parameters.keys() - names)[:5]}, or too many, {sorted(names - parameters.keys())[:5]}."
                )
            for name, parameter in parameters.items():
                tensor = file.get_tensor(name)
                if tensor.shape != parameter.shape:
                    raise ValueError(
                        f"{folder / HEADS}: {name} must be {list(parameter.shape)} for this model, got "
                        f"{list(tensor.shape)}. Load the model that the heads belong to."
                    )
                parameter.copy_(tensor)
        return medusa
