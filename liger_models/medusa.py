"""Medusa: heads beside the language-model head that predict the tokens behind the next one, for speculative decoding.

With h the last hidden states, head k = 1 ... K predicts the token k + 1 positions ahead (k = 0: the model's own head)::

    p_k = softmax(W_k · block(... block(h))),  block(x) = x + SiLU(A · x + b)
    loss = [L_0 +] heads_weight · Σ decay^k · L_k

L_k is the mean cross entropy of head k over the tokens whose target k + 1 positions ahead is in the same document and
not ignored. No head's logits are ever built. At first A and b are 0 and W_k is the model's own head.

Source: https://arxiv.org/abs/2401.10774
"""

import shutil
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.convert.checkpoint import CONFIG, read_json_config, write_folder, write_json
from liger_models.convert.ranks import agreeing, this_rank
from liger_models.kernels.dispatch import check
from liger_models.kernels.linear_cross_entropy import linear_cross_entropy
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.head import LigerLMHead
from liger_models.layers.sequence import Sequence
from liger_models.layers.tensor_parallel import is_cut
from liger_models.lora import Adapter, LoRALMHead, adapter_config

HEADS = "medusa_lm_head.safetensors"
IGNORED = -100


class MedusaOutput(NamedTuple):
    """Result of `LigerMedusa.forward`; what was not computed is None.

    Attributes:
        loss: [] fp32.
        base_loss: [] L_0, without gradient. None for a frozen model, and where all heads share one projection: there
            the loss is one sum.
        head_losses: [K] L_1 ... L_K, without gradient; None where all heads share one projection.
        aux_loss: [] what mixture-of-experts layers add to ``loss`` unless the model is frozen.
        log_probs: [1 + K, B, T] fp32 of each head's targets, the model's own first; 0 where there is no target.
        logits: [1 + K, B, T, V], the model's own first.
    """

    loss: Tensor | None = None
    base_loss: Tensor | None = None
    head_losses: Tensor | None = None
    aux_loss: Tensor | None = None
    log_probs: Tensor | None = None
    logits: Tensor | None = None


class ResidualBlock(nn.Module):
    """``x + SiLU(A · x + b)``, the identity at first.

    Args:
        hidden_size: C.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., C]."""
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Sequential):
    """Residual blocks, and behind them a `LigerLMHead` unless that is shared; the parameters' names are the format's.

    The projection runs inside this forward, where FSDP has gathered the weight.
    """

    def forward(self, x: Tensor, *target: Tensor, **options: Any) -> Any:  # type: ignore[override]
        """x [..., C] through the blocks; then whatever `LigerLMHead` makes of it, if there is one."""
        for module in self:
            x = module(x, *target, **options) if isinstance(module, LigerLMHead) else module(x)
        return x


class LigerMedusa(nn.Module):
    """A model with Medusa heads. They are trained through its forward; the model stays a model of its own, ``model``.

    Args:
        model: any of this package's, loaded; already sharded, or sharded together with the heads by `apply_fsdp`.
        num_heads: K.
        num_layers: residual blocks of each head.
        share_lm_head: the heads project with the model's own head. It saves K · V · C weights.
        freeze: only the heads are trained (Medusa-1), and L_0 is left out. Otherwise all is (Medusa-2), of a model with
            adapters (LoRA) these alone.
        decay: of the heads' weights in the loss.
        heads_weight: of all heads' losses together; an attribute that a schedule may change.

    Raises:
        ValueError: no heads or blocks, a model that is cut by `apply_tp`, has no weights yet, or whose head has an
            adapter; a negative ``decay``.
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
        check(num_heads >= 1, f"LigerMedusa: num_heads must be at least 1, got {num_heads}.")
        check(num_layers >= 1, f"LigerMedusa: num_layers must be at least 1, got {num_layers}.")
        check(decay >= 0, f"LigerMedusa: decay must not be negative, got {decay}.")
        check(
            not isinstance(model.lm_head, LoRALMHead),
            "LigerMedusa: the model's head must have no adapter. Call merge_lora first, or adapt other layers.",
        )
        check(
            model.ranks is None and model.context_ranks is None,
            "LigerMedusa: the model must not be cut by apply_tp or apply_cp. Use FSDP alone.",
        )
        check(model.device.type != "meta", "LigerMedusa: the model must have weights, got it on meta. Load it first.")
        self.model, self.num_layers, self.share_lm_head = model, num_layers, share_lm_head
        self.freeze, self.decay, self.heads_weight = freeze, decay, heads_weight
        adapted = adapter_config(model) is not None
        model.requires_grad_(not (freeze or adapted))
        for module in model.modules():
            if isinstance(module, Adapter):
                module.requires_grad_(not freeze)
        own: Any = model.lm_head
        hidden_size, scaling = model.config.hidden_size, {"logit_scale": own.logit_scale, "softcap": own.softcap}
        weight = own.weight.detach()
        if is_cut(weight) and not share_lm_head:
            weight = weight.full_tensor()
        self.heads = nn.ModuleList()
        for _ in range(num_heads):
            head = MedusaHead(*(ResidualBlock(hidden_size) for _ in range(num_layers)))
            if not share_lm_head:
                with torch.device("meta"):
                    projection = LigerLMHead(hidden_size, weight.shape[0], kernels=model.kernels, **scaling)
                projection.weight = nn.Parameter(weight.clone())
                head.append(projection)
            self.heads.append(head.to(model.device, model.dtype))

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        return_log_probs: bool = False,
        **inputs: Any,
    ) -> MedusaOutput:
        """The loss without any logits, or without ``labels`` the logits of all heads.

        Args:
            input_ids: [B, T] int64.
            labels: [B, T] int64, unshifted; −100 is ignored.
            num_items_in_batch: divisor of each head's summed loss. Default: the number of targets that it has.
            return_log_probs: with ``labels``, log-probabilities of all heads' targets in place of the loss.
            inputs: others of `CausalLM.forward`: ``position_ids``, ``attention_mask``, ``cu_seqlens``,
                ``inputs_embeds``.

        Raises:
            ValueError: as `CausalLM.forward`.
        """
        check(labels is not None or not return_log_probs, "LigerMedusa: return_log_probs needs labels. Pass them.")
        check(
            "return_logits" not in inputs,
            "LigerMedusa: return_logits must not be given. Without labels all heads' logits are returned.",
        )
        if labels is None:
            tokens = input_ids if input_ids is not None else inputs["inputs_embeds"]
            nothing = torch.full(tokens.shape[:2], IGNORED, device=tokens.device)
            out = self.model(
                input_ids, labels=nothing, loss_function=lambda hidden, *_: hidden, return_logits=True, **inputs
            )
            others = [head(out.loss) for head in self.heads]
            others = [(self.model.lm_head(other) if self.share_lm_head else other)[1] for other in others]
            return MedusaOutput(aux_loss=out.aux_loss, logits=torch.stack([out.logits, *others]))
        ahead = self.targets(labels, inputs.get("attention_mask"), inputs.get("cu_seqlens"))

        def of_heads(hidden: Tensor, weight: Tensor, target: Tensor) -> MedusaOutput:
            if return_log_probs:
                return MedusaOutput(log_probs=self._log_probs(hidden, weight, torch.cat([target[None], ahead])))
            if self.share_lm_head:
                return self._shared_loss(hidden, weight, torch.cat([target[None], ahead]), num_items_in_batch)
            own = None if self.freeze else self._of_own(hidden, weight, target, num_items=num_items_in_batch).loss
            losses = [
                head(hidden, target, num_items=num_items_in_batch)[0]
                for head, target in zip(self.heads, ahead, strict=True)
            ]
            each = torch.stack(losses)
            loss = (each * self._weights(each.device)).sum()
            loss = loss if own is None else own + loss
            return MedusaOutput(loss, None if own is None else own.detach(), each.detach())

        out = self.model(input_ids, labels=labels, loss_function=of_heads, **inputs)
        result: MedusaOutput = out.loss._replace(aux_loss=out.aux_loss)
        if result.loss is not None and out.aux_loss is not None and not self.freeze:
            result = result._replace(loss=result.loss + out.aux_loss)
        return result

    def targets(self, labels: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """[K, B, T] int64: the label k + 1 positions ahead, −100 beyond the end of the document or the row.

        Args:
            labels: [B, T] int64, unshifted.
            attention_mask, cu_seqlens: as for `CausalLM.forward`.
        """
        B, T = labels.shape
        sequence = Sequence.build(
            (B, T), labels.device, {}, windows={}, attention_mask=attention_mask, cu_seqlens=cu_seqlens
        )
        target, ahead = sequence.shift(labels), []
        for _ in self.heads:
            target = sequence.shift(target)
            ahead.append(target)
        return torch.stack(ahead)

    def _weights(self, device: torch.device) -> Tensor:
        """Of the heads in the loss, [K] fp32."""
        powers = torch.arange(1, len(self.heads) + 1, dtype=torch.float32, device=device)
        return self.heads_weight * self.decay**powers

    def _of_own(self, hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
        head = self.model.lm_head
        return linear_cross_entropy(
            hidden, weight, target, softcap=head.softcap, logit_scale=head.logit_scale, **options
        )

    def _shared_loss(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, num_items: Tensor | float | None
    ) -> MedusaOutput:
        """One pass over the shared head for all: its gradient is made once."""
        rows = [head(hidden) for head in self.heads]
        factors = self._weights(hidden.device)
        if self.freeze:
            targets = targets[1:]
        else:
            rows, factors = [hidden, *rows], torch.cat([factors.new_ones(1), factors])
        counts = (targets != IGNORED).sum((1, 2)).clamp(min=1) if num_items is None else num_items
        token_weight = (factors / counts)[:, None, None].expand(targets.shape)
        loss = self._of_own(torch.stack(rows), weight, targets, token_weight=token_weight, reduction="sum").loss
        return MedusaOutput(loss)

    def _log_probs(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        options: dict[str, Any] = {"reduction": "sum", "return_log_probs": True}
        if self.share_lm_head:
            rows = torch.stack([hidden, *(head(hidden) for head in self.heads)])
            every: Tensor = self._of_own(rows, weight, targets, **options).log_probs
            return every
        own = self._of_own(hidden, weight, targets[0], **options).log_probs
        others = [head(hidden, target, log_probs=True)[0] for head, target in zip(self.heads, targets[1:], strict=True)]
        return torch.stack([own, *others])

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        *,
        base_model_name_or_path: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the heads, in the format of the released Medusa checkpoints; the model is saved by its own method.

        Of a sharded model every rank must call it. Shared projections are written out for each head, so that readers
        need not know of the sharing.

        Args:
            folder: a folder for the heads alone, made if it does not exist.
            base_model_name_or_path: the model that they belong to, for config.json.
            dtype: of the tensors in the file; None keeps the heads' own.

        Raises:
            ValueError: a folder that holds a model.
            OSError: the folder cannot be written.
        """
        folder = Path(folder).absolute()
        with agreeing():
            models = sorted(path.name for path in folder.glob("model*.safetensors*")) if folder.is_dir() else []
            check(
                not models,
                f"LigerMedusa.save_pretrained: {folder} must not hold a model, got {', '.join(models[:3])}. Take a "
                "folder for the heads alone.",
            )
        for module in self.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:  # FSDP: what an evaluation has left gathered
                reshard()
        parameters: dict[str, Any] = dict(self.heads.named_parameters())
        if self.share_lm_head:
            names = [f"{k}.{self.num_layers}.weight" for k in range(len(self.heads))]
            parameters |= dict.fromkeys(names, self.model.lm_head.weight)
        tensors = {}
        for name, parameter in parameters.items():
            whole = parameter.full_tensor() if is_cut(parameter) else parameter
            if this_rank() == 0:
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

        def write(place: Path) -> None:
            write_json(place / CONFIG, config)
            save_file(tensors, place / HEADS, metadata={"format": "pt"})
            shutil.copymode(place / CONFIG, place / HEADS)  # safetensors makes files that only their owner can read

        with agreeing():
            if this_rank() == 0:
                write_folder(folder, write)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], model: CausalLM, **options: Any) -> "LigerMedusa":
        """Heads that `save_pretrained`, or somebody else in that format, has written, on a model.

        Args:
            folder: with ``config.json`` and ``medusa_lm_head.safetensors``.
            model: as for `LigerMedusa`. The heads take its device and dtype.
            options: ``freeze``, ``decay`` and ``heads_weight`` as for `LigerMedusa`.

        Raises:
            FileNotFoundError: a file that is missing.
            ValueError: a config.json without the number of heads, tensors that are missing, left over or do not fit.
        """
        folder = Path(folder)
        config = read_json_config(folder)
        heads: Any = config.get("medusa_num_heads")
        layers: Any = config.get("medusa_num_layers", 1)
        check(
            type(heads) is int and type(layers) is int,
            f"{folder / CONFIG}: medusa_num_heads and medusa_num_layers must be integers, got {heads} and {layers}.",
        )
        if not (folder / HEADS).is_file():
            raise FileNotFoundError(
                f"{folder / HEADS}: must exist, got none. Of a medusa_lm_head.pt make it with torch.load and "
                "safetensors.torch.save_file; the names of the tensors are the same."
            )
        shared = bool(config.get("original_lm_head", False))
        medusa = cls(model, heads, layers, share_lm_head=shared, **options)
        parameters = dict(medusa.heads.named_parameters())
        projections = {f"{k}.{layers}.weight" for k in range(heads)} if shared else set()
        with safe_open(folder / HEADS, framework="pt") as file, torch.no_grad():
            names = set(file.keys()) - projections
            check(
                names == parameters.keys(),
                f"{folder / HEADS}: must hold {len(parameters)} tensors such as 0.0.linear.weight, got too few, "
                f"{sorted(parameters.keys() - names)[:5]}, or too many, {sorted(names - parameters.keys())[:5]}.",
            )
            for name, parameter in parameters.items():
                tensor = file.get_tensor(name)
                check(
                    tensor.shape == parameter.shape,
                    f"{folder / HEADS}: {name} must be {list(parameter.shape)} for this model, got "
                    f"{list(tensor.shape)}. Take the model that the heads belong to.",
                )
                parameter.copy_(tensor)
        return medusa
