"""Classifiers of whole texts, such as reward models, with transformers' interface."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from liger_models.base.causal_lm import CausalLM
from liger_models.convert.files import open_safetensors, read_headers
from liger_models.convert.save import write_checkpoint
from liger_models.hf.adapted import Adaptable
from liger_models.hf.checkpoint import (
    PREFIX,
    UPLOAD,
    Checkpoint,
    Mismatch,
    as_dtype_of,
    body_tensors,
    check_shapes,
    check_upload,
    find_mismatched_shapes,
    load_body,
    uploads,
    writes,
)
from liger_models.hf.model import LigerModel, LigerPreTrainedModel, tied_decoder, without_head
from liger_models.layers.linear import is_sharded

SCORE = "score.weight"


class LigerForSequenceClassification(Adaptable, Checkpoint, LigerPreTrainedModel):
    """A body (a model without its head) with a linear head that computes the scores of each text from its last token.

    Each model type has a derived class.

    The language-model head of the decoder is not used. That head is tied to the embedding, so it adds no parameter.

    Args:
        config: configuration for the transformers class with the same name.
        decoder: a model of this package whose head is tied to the embedding. By default, a new model with random
            weights.
    """

    accepts_loss_kwargs = True
    """Tells Trainer to pass ``num_items_in_batch``."""

    def __init__(self, config: PreTrainedConfig, decoder: CausalLM | None = None) -> None:
        if decoder is None:
            config = copy.deepcopy(config)  # the caller may build other models from the same configuration
        super().__init__(config)
        self.model = LigerModel(config, without_head(decoder or tied_decoder(config)))
        self.num_labels = config.num_labels
        # The head that computes scores. PEFT looks for the name `score`, and Trainer reads `num_labels`.
        text = config.get_text_config()
        self.score = nn.Linear(text.hidden_size, config.num_labels, bias=False)
        nn.init.normal_(self.score.weight, std=getattr(text, "initializer_range", 0.02))
        self.score.to(self.model.decoder.device, self.model.decoder.dtype)
        self.loss_type = "ForSequenceClassification"
        self._no_split_modules = {type(block).__name__ for block in self.model.decoder.blocks}
        self.post_init()
        self._keys_to_ignore_on_save: set[str] = set()  # drop the attributes that post_init copied from the decoder

    @classmethod
    def _load(
        cls,
        config: PreTrainedConfig,
        folder: Path,
        dtype: torch.dtype | str | None,
        device: torch.device,
        ignore_mismatched_sizes: bool,
    ) -> tuple[Any, list[str], list[Mismatch]]:
        # `load_pretrained` is not used, because it would reject a score head. It would also reject a causal model whose
        # language-model head differs from the embedding.
        stored = read_headers(folder)
        target = as_dtype_of(stored, dtype)
        with device:
            model = cls(config, tied_decoder(config).to(target))
        scores = find_mismatched_shapes({SCORE: model.score.weight.shape}, stored)
        if not ignore_mismatched_sizes:
            check_shapes(f"{cls.__name__}: {folder}", scores)
        mismatched = load_body(cls.__name__, model.model.decoder, folder, stored, draws=ignore_mismatched_sizes)
        # If the checkpoint has no score head, as for a causal model, the new score head keeps its random values.
        if SCORE in stored and not scores:
            with open_safetensors(stored[SCORE].file) as opened, torch.no_grad():
                model.score.weight.copy_(opened.get_tensor(SCORE))
        return model, [] if SCORE in stored else [SCORE], mismatched + scores

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        auto_map: bool = False,
        **options: Any,
    ) -> None:
        """Write a checkpoint that the transformers class with the same name can load.

        The new checkpoint replaces an old checkpoint in one step. The arguments are those of
        `LigerForCausalLM.save_pretrained`.

        Raises:
            ValueError: parameters have no name in a checkpoint, or ``auto_map`` is True.
        """
        if auto_map:
            raise ValueError(
                "save_pretrained: auto_map must be False for a head for classification, got True. Load the folder with "
                f"liger_models.hf.{type(self).__name__}, or call liger_models.hf.register() first."
            )
        if push_to_hub:
            check_upload(self)
        if self._without_tensors(save_directory, is_main_process, state_dict):
            return

        # Collect the body under the names of a checkpoint, and the score head.
        self.model.apply_edits()
        tensors = dict(self.named_parameters()) if state_dict is None else state_dict
        sharded = any(map(is_sharded, tensors.values()))
        body = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        score: Any = tensors[SCORE].detach()
        tensors = body_tensors(self.model.decoder, body)
        tensors[SCORE] = score.full_tensor() if is_sharded(score) else score
        is_writer = writes(is_main_process, sharded=sharded)
        if getattr(self, "_hf_peft_config_loaded", False):  # only the adapter is saved
            PreTrainedModel.save_pretrained(
                self, save_directory, is_writer, tensors, push_to_hub, max_shard_size, **options
            )
            return

        if not is_writer:
            return
        others = {name: options[name] for name in options.keys() - UPLOAD}

        def write(folder: Path) -> None:
            PreTrainedModel.save_pretrained(self, folder, True, tensors, False, max_shard_size, **others)

        with uploads(self, save_directory, push_to_hub, options):
            write_checkpoint(Path(save_directory), write)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters as `LigerForCausalLM.load_state_dict` does."""
        if SCORE in state_dict and not any(name.startswith(PREFIX) for name in state_dict):
            check_shapes("load_state_dict", find_mismatched_shapes({SCORE: self.score.weight.shape}, state_dict))
            self.score.load_state_dict({"weight": state_dict[SCORE]}, assign=assign)
            state_dict = {name: tensor for name, tensor in state_dict.items() if name != SCORE}
        return super().load_state_dict(state_dict, strict, assign)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> Any:
        """Compute the scores of the last token of each text, and the loss if ``labels`` are given.

        Args:
            labels: [B] int64 for a single class per text, [B] floats for regression, or [B, num_labels] floats for
                several classes per text. ``problem_type`` in the configuration selects one of these.
            num_items_in_batch: number by which the summed loss is divided, for a step of several batches or ranks. The
                default is the number of labels that are not -100.
            Others: as in `LigerForCausalLM.forward`. The scored token is the last token that is not ``pad_token_id``.
                With ``inputs_embeds``, it is the last token of the row.

        Returns:
            ``SequenceClassifierOutputWithPast`` with ``logits`` [B, num_labels]; without ``return_dict`` a tuple.

        Raises:
            ValueError: there are several texts but no ``pad_token_id``; otherwise as for `LigerForCausalLM.forward`.
        """
        inputs.pop("margin", None)  # TRL's RewardTrainer passes the margin, and subtracts it itself
        out = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, return_dict=True,
            **inputs,
        )  # fmt: skip

        # The hidden state of the last token that is not padding: [B, T, C] -> [B, C].
        hidden, pad = out.last_hidden_state, self.config.get_text_config().pad_token_id
        rows = torch.arange(len(hidden), device=hidden.device)
        if pad is None and len(rows) != 1:
            raise ValueError(
                f"forward: config.pad_token_id must be set for several texts, got None and {len(rows)} texts. Set it "
                "to the token that pads them."
            )
        last: Any = -1
        if input_ids is not None and pad is not None:
            last = (torch.arange(input_ids.shape[1], device=input_ids.device) * (input_ids != pad)).argmax(1)
        logits = self.score(hidden[rows, last])  # [B, num_labels]

        # The loss function returns the mean over the labels of this batch. If `num_items_in_batch` is given, the sum
        # over this batch is divided by it instead.
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=None, labels=labels, pooled_logits=logits, config=self.config)
            if num_items_in_batch is not None:
                loss = loss * (labels != -100).sum() / num_items_in_batch
        outputs = SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        as_dict = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
        return outputs if as_dict else outputs.to_tuple()
