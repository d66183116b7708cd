"""The models of this package with transformers' interface: body, head, loss, generation."""

import copy
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, Cache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from liger_models.arch.auto import get_arch
from liger_models.base.causal_lm import CausalLM
from liger_models.common.errors import check_values, is_traced
from liger_models.convert.config_map import read_config
from liger_models.convert.files import read_headers
from liger_models.convert.save import write_checkpoint
from liger_models.convert.tensors import hf_tensors
from liger_models.distributed.ranks import run_on_rank_zero
from liger_models.generation.engine_routing import select_routing
from liger_models.hf.adapted import Adaptable
from liger_models.hf.cache import LigerCache
from liger_models.hf.checkpoint import (
    Checkpoint,
    Loading,
    Mismatch,
    as_dtype_of,
    body_tensors,
    check_upload,
    load_body,
    uploads,
    writes,
)
from liger_models.hf.config import class_name, to_json, to_liger
from liger_models.hf.edits import Edits, replace_layer
from liger_models.hf.generate import EngineGenerationMixin, with_stored_signature
from liger_models.hf.trl import fused_forward
from liger_models.kernels.options import KernelOptions
from liger_models.layers.layer import Layer, layers_of
from liger_models.layers.linear import is_sharded
from liger_models.layers.lm_head import LigerLMHead

LOSS_TYPE = "ForCausalLM"
"""The ``loss_type`` for which this package's head computes the loss. For any other type, transformers' loss function
gets the logits.
"""
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Accepted values of ``attn_implementation``. Whatever the value, the batch determines which kernel runs."""


def find_documents(position_ids: Tensor) -> Tensor | None:
    """Return the boundaries of the packed documents, [n + 1] int64; None if each row is one document.

    Each position 0 starts a document.

    Reading the positions synchronizes with the device once per forward, whereas flash attention in transformers
    synchronizes in every layer. If the batch has ``cu_seq_lens_q``, the positions are not read.
    ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` creates ``cu_seq_lens_q``.

    Args:
        position_ids: [B, T] integers.

    Raises:
        ValueError: a position is neither 0 nor larger than the position before it. On a GPU, a device-side assertion
            fails instead.
    """
    starts = position_ids == 0
    check_values(
        ((position_ids.diff(dim=1) > 0) | starts[:, 1:]).all(),
        "forward: position_ids of packed documents must start at 0 and rise in each document, got others, which do not "
        "say where a document ends. Pass the documents' bounds as cu_seqlens.",
    )
    starts[:, 0] = True  # each row of the batch also starts a document
    # [B, T] -> [n], the indices of the starts among the B · T tokens. The number of tokens is the last boundary.
    bounds = starts.flatten().nonzero()[:, 0]
    return None if len(bounds) == len(starts) else nn.functional.pad(bounds, (0, 1), value=starts.numel())


class LigerPreTrainedModel(PreTrainedModel):
    """The base class of the body and of the model with a head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, because the decoder itself initializes or loads its weights."""

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        name = attn_implementation or "sdpa"
        if name not in ATTENTION:
            raise ValueError(
                f"{type(self).__name__}: attn_implementation must be one of {', '.join(ATTENTION)}, got {name!r}. "
                "Leave it out: the kernel is chosen by the batch."
            )
        return name

    def to(self, *args: Any, **options: Any) -> Any:
        """Call `torch.nn.Module.to`. If parameters have no values, the error says how to load values."""
        try:
            return super().to(*args, **options)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{type(self).__name__}: parameters must have values to be moved, got some on the meta device. "
                "Accelerate's load_checkpoint_and_dispatch finds no packed projections by the names of a checkpoint: "
                "call from_pretrained(folder, device_map=...), or load_state_dict(tensors, assign=True)."
            ) from error

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload the model from rank 0. All other ranks that call this method wait for the upload.

        Args:
            repo_id: name of the repository, which is created if it does not exist.
            options: as for `transformers.PreTrainedModel.push_to_hub`.

        Raises:
            ValueError: the model is sharded.
        """
        check_upload(self)
        return run_on_rank_zero(f"push_to_hub {repo_id}", partial(super().push_to_hub, repo_id, **options))

    def get_decoder(self) -> "LigerModel":
        """Return the body, the model without its head."""
        body: LigerModel = self.base_model
        return body

    def get_input_embeddings(self) -> Any:
        """Return the embedding."""
        return self.get_decoder().decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding. A plain `nn.Embedding` becomes an embedding of this package, with the model's scale.

        Raises:
            ValueError: the width of the new embedding differs from the model's.
        """
        self.get_decoder().embed_tokens = value

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        size: int = self.config.get_text_config().vocab_size
        return size

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """Resize the embedding, the head and ``vocab_size``. Each new row is the mean of the old rows.

        Raises:
            ValueError: ``mean_resizing`` is False; otherwise as for `CausalLM.resize_token_embeddings`.
        """
        if not mean_resizing:
            raise ValueError(
                "resize_token_embeddings: mean_resizing must be True: new rows are the mean of the others."
            )
        if new_num_tokens is None and pad_to_multiple_of is None:
            return self.get_input_embeddings()

        # The decoder changes its own configuration, and `Edits` copies the change to transformers' configuration.
        body = self.get_decoder()
        body.decoder.resize_token_embeddings(new_num_tokens or body.decoder.config.vocab_size, pad_to_multiple_of)
        body.apply_edits()
        return body.decoder.embed_tokens

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether blocks recompute activations in the backward."""
        return self.get_decoder().decoder.checkpointing != "none"

    @property
    def is_gradient_checkpointing(self) -> bool:
        """The older name of `is_activation_checkpointing`, with the same value."""
        return self.is_activation_checkpointing

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: object = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Recompute activations in the backward; see `CausalLM.activation_checkpointing_enable`."""
        decoder = self.get_decoder().decoder
        decoder.activation_checkpointing_enable(every_n_layers=every_n_layers, offload=offload)

    def activation_checkpointing_disable(self) -> None:
        """Stop recomputing activations."""
        self.get_decoder().decoder.set_checkpointing("none")

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None, **options: Any) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """The older name of `activation_checkpointing_disable`."""
        self.activation_checkpointing_disable()

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: object = None, every_n_layers: int = 1
    ) -> None:
        # transformers' own methods call this, and so do tools with their own versions of these methods (LLaMA-Factory).
        if enable:
            self.activation_checkpointing_enable(every_n_layers=every_n_layers)
        else:
            self.activation_checkpointing_disable()


class UnusedHead(LigerLMHead):
    """A head that is never called. Its weight is the embedding's weight, but is not registered as a parameter.

    FSDP requires that all modules that share a parameter are in one group. If a model has no output embedding,
    Accelerate and other tools put the embedding into a group without the head. Therefore, only the embedding may
    register the weight as a parameter.
    """

    holder: tuple[CausalLM]
    """The decoder, in a tuple. Without the tuple, the decoder would become a submodule of its own head."""

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The weight of the decoder's current embedding, which may have been replaced since this head was created."""
        return self.holder[0].embed_tokens.weight


def tied_decoder(config: PreTrainedConfig) -> CausalLM:
    """Return a new decoder whose head is tied to the embedding and has no bias, whatever the configuration says."""
    arch = get_arch(config.model_type)
    ours: Any = read_config(arch.config_class, to_json(config) | {"tie_word_embeddings": True})
    if getattr(ours, "lm_head_bias", False):
        ours = dataclasses.replace(ours, lm_head_bias=False)
    decoder: CausalLM = arch(ours)
    return decoder


def without_head(decoder: CausalLM) -> CausalLM:
    """Turn a decoder's tied head into an `UnusedHead`, and return the decoder."""
    head: Any = decoder.lm_head
    head.__class__ = UnusedHead
    head._parameters.clear()
    head.holder = (decoder,)
    return decoder


PARTS = ("embed_tokens", "layers", "norm", "visual")
"""Names of the decoder's parts that are also attributes of `LigerModel`, so that users can freeze or replace them."""


class LigerModel(Loading, LigerPreTrainedModel):
    """The body of a model, which returns hidden states.

    ``from_pretrained`` loads the body from a checkpoint of any family, with or without a head.

    The parameters of the decoder's head are not parameters of the body, so ``base_model.requires_grad_(False)`` leaves
    the head trainable.

    Args:
        config: configuration of transformers.
        decoder: a model of this package. By default, a new model without a head, with random weights.
    """

    config_class = AutoConfig  # all families share this class for the body

    def __init__(self, config: PreTrainedConfig, decoder: CausalLM | None = None) -> None:
        if decoder is None:
            config = copy.deepcopy(config)  # the caller may build other models from the same configuration
            decoder = without_head(tied_decoder(config))
        super().__init__(config)
        self.decoder = decoder
        self.edits = Edits(config, decoder)
        self.post_init()

    @classmethod
    def _load(
        cls,
        config: PreTrainedConfig,
        folder: Path,
        dtype: torch.dtype | str | None,
        device: torch.device,
        ignore_mismatched_sizes: bool,
    ) -> tuple[Any, list[str], list[Mismatch]]:
        stored = read_headers(folder)
        with device:
            model = cls(config, without_head(tied_decoder(config).to(as_dtype_of(stored, dtype))))
        mismatched = load_body(cls.__name__, model.decoder, folder, stored, draws=ignore_mismatched_sizes)
        return model, [], mismatched

    def train(self, mode: bool = True) -> Any:
        """Set training or eval mode."""
        super().train(mode)
        self.decoder.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if "decoder" not in self._modules:  # PEFT's tree has replaced the decoder, but lacks the rotary embeddings
            self.decoder._apply(fn, recurse)
        return self

    @property
    def caches_only_keys(self) -> bool:
        """Whether decoding caches only keys and values, not latents, linear-attention states or data about images."""
        layers = [*layers_of(self.decoder)]
        latent = any(layer.attention is not None and layer.attention.caches_latents for layer in layers)
        return not (latent or any(layer.recurrent for layer in layers) or self.decoder.prompt_inputs)

    def apply_edits(self) -> None:
        """Apply edits of the configuration to the layers, and changes of the model to the configuration."""
        self.edits.apply(self.config, self.decoder)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the body, without the head."""
        head = f"{prefix}{'.' if prefix else ''}decoder.lm_head."
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if not name.startswith(head):
                yield name, parameter

    def __getattr__(self, name: str) -> Any:
        # Look up parts first. If a part, such as a tower, is missing, the decoder raises the error.
        if name in PARTS and name not in self._modules:
            if sys._getframe(1).f_globals.get("__name__", "").startswith("liger_kernel."):
                raise ValueError(
                    f"{type(self).__name__}: use_liger_kernel must be False, got True. It patches layers of "
                    "transformers, which this model has not. Leave it out: the layers run on fused kernels already."
                )
            return getattr(self.decoder, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}. Its parts are {', '.join(PARTS)}, and those of "
                "model.model.decoder, whose projections are packed. Checkpoints are loaded by from_pretrained."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in PARTS or name in self._modules:  # PEFT's tree has some of the parts
            super().__setattr__(name, value)
            return
        if name == "embed_tokens":
            replace_layer(self.decoder, name, value, "set_input_embeddings")
        else:
            setattr(self.decoder, name, value)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        **options: Any,
    ) -> None:
        """Write a checkpoint without a head, which ``AutoModel`` loads. The new checkpoint replaces an old checkpoint
        in one step.

        Args:
            save_directory: the folder, which is created if it does not exist.
            is_main_process: whether this rank writes an unsharded model. By default, only rank 0 writes. The parameters
                of a sharded model are gathered from all ranks, and rank 0 writes them.
            state_dict: unsharded tensors to save instead of the parameters, by their names in the body.
            push_to_hub: whether rank 0 uploads the written files; ``options`` are then arguments of the method
                ``push_to_hub``.
            max_shard_size: maximum size of a file, in bytes or as "5GB".
            options: other arguments of transformers, which are ignored.

        Raises:
            ValueError: parameters have no name in a checkpoint.
        """
        if push_to_hub:
            check_upload(self)
        # All ranks together gather the shards of each tensor. The keys are the names in a checkpoint.
        self.apply_edits()
        parameters = dict(self.named_parameters()) if state_dict is None else state_dict
        parameters = {name.removeprefix("decoder."): tensor for name, tensor in parameters.items()}
        sharded = any(map(is_sharded, parameters.values()))
        tensors = body_tensors(self.decoder, parameters)
        if writes(is_main_process, sharded=sharded):
            config = copy.deepcopy(self.config)
            config.architectures = [class_name(AutoModel, config.model_type) or type(self).__name__]
            config.dtype = self.decoder.dtype
            # The experts' matrices are views of one tensor. safetensors would reject a view, or write the whole tensor.
            tensors = {
                name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
                for name, tensor in tensors.items()
            }

            def write(folder: Path) -> None:
                config.save_pretrained(folder)
                save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)

            with uploads(self, save_directory, push_to_hub, options):
                write_checkpoint(Path(save_directory), write)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> Any:
        """Compute the hidden states after the final norm.

        Args:
            output_router_logits: ignored. Router logits are returned whenever the model has routers.
            Others: as in `LigerForCausalLM.forward`.

        Returns:
            ``MoeModelOutputWithPast``; without ``return_dict`` a tuple.
        """
        prepared, cache = self.prepare(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_attentions,
            inputs,
        )  # fmt: skip
        all_hidden = _resolve(output_hidden_states, self.config, "output_hidden_states")
        out = self.decoder(**prepared, return_logits=False, output_hidden_states=all_hidden)
        outputs = MoeModelOutputWithPast(
            last_hidden_state=out.hidden_states[-1],
            past_key_values=None if cache is None else cache.returned(),
            hidden_states=out.hidden_states if all_hidden else None,
            router_logits=out.router_logits or None,
        )
        return outputs if _resolve(return_dict, self.config, "return_dict") else outputs.to_tuple()

    def prepare(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        output_attentions: bool | None,
        inputs: dict[str, Any],
        *,
        has_labels: bool = False,
    ) -> tuple[dict[str, Any], LigerCache | None]:
        """Return the arguments of the decoder's forward, and the cache that the forward returns."""
        # A forward that is compiled or transformed by torch.func is not checked, because edits were applied before.
        if not is_traced():
            self.apply_edits()
        if _resolve(output_attentions, self.config, "output_attentions"):
            raise ValueError(
                "forward: output_attentions must be False: the kernels do not form attention weights. For them use the "
                "class of transformers."
            )
        # Drop inputs that transformers also ignores, unless the family reads them.
        unused = {"cache_position", "token_type_ids"} - {*self.decoder.prompt_inputs}
        inputs = {name: value for name, value in inputs.items() if value is not None and name not in unused}
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None:
            raise ValueError("forward: input_ids or inputs_embeds must be given, got neither.")
        attention_mask = _check_mask(attention_mask)

        # Positions [4, B, T] are the positions in the text, followed by the positions in time, height and width.
        text_positions = position_ids
        if position_ids is not None and position_ids.dim() == 3 and len(position_ids) == 4:
            text_positions, position_ids = position_ids[0], position_ids[1:]

        # prime-rl passes the lengths of packed documents.
        lengths = inputs.pop("seq_lens", None)
        if inputs.pop("seq_lens_are_pre_shard", False):
            raise ValueError(
                "forward: seq_lens_are_pre_shard must be False, got True, with which prime-rl splits rows over ranks. "
                "Set model.cp to 1."
            )
        if lengths is not None:
            inputs["cu_seqlens"] = nn.functional.pad(lengths.cumsum(0), (1, 0))

        # Trainers may pass experts for all blocks, even blocks without routers, and rows of zeros for padding.
        if "routed_experts" in inputs:
            inputs["routed_experts"] = select_routing(self.decoder, inputs["routed_experts"])

        # Find packed documents: either the batch has their boundaries, or each position 0 starts a document.
        is_packed = "cu_seqlens" in inputs or "cu_seq_lens_q" in inputs
        documents = inputs.pop("seq_idx", None)  # collators return `seq_idx` in addition to positions
        if documents is not None and not is_packed and text_positions is None:
            raise ValueError(
                "forward: seq_idx needs position_ids or cu_seq_lens_q, got it alone. Let the collator return them."
            )
        if attention_mask is None and past_key_values is None and not is_packed:
            if text_positions is not None and text_positions.dim() <= 2 and tokens.shape[1] > 1:
                bounds = find_documents(text_positions.expand(tokens.shape[:2]))
                if bounds is not None:
                    inputs["cu_seqlens"], is_packed = bounds, True
            if position_ids is not None and position_ids is text_positions and position_ids.dim() == 3:
                check_values(
                    ~(position_ids == 0).all(0)[:, 1:].any(),
                    "forward: position_ids in time, height and width must be 0 in all three at the first token alone, "
                    "got another one. Pass the bounds of packed documents as cu_seqlens, or [4, B, T] with those of "
                    "the text.",
                )

        # The cache is the caller's `LigerCache`, a copy of another cache, or a new one. Packed documents and losses
        # need no cache.
        if past_key_values is None or isinstance(past_key_values, LigerCache):
            cache = past_key_values
        else:
            cache = LigerCache.in_place_of(past_key_values, allowed=self.caches_only_keys)
        if use_cache is None:
            use_cache = not self.training and bool(getattr(self.config.get_text_config(), "use_cache", False))
        if cache is None and use_cache and not is_packed and not has_labels:
            cache = LigerCache()
        arguments = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": None if cache is None else cache.decode,
        }
        return arguments | inputs, cache


def _check_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Return the mask as integers. Raise ValueError for values other than 0 and 1."""
    # PEFT's prompt tuning creates masks of floats. Additive masks, which have 0 for tokens, are rejected.
    if attention_mask is not None and attention_mask.is_floating_point():
        check_values(
            (attention_mask >= 0).all(),
            "forward: attention_mask must be 1 for tokens and 0 for padding, got values below 0, as in a mask that is "
            "added to scores. Pass mask == 0.",
        )
        check_values(
            (attention_mask == attention_mask.trunc()).all(),
            "forward: attention_mask must be 1 for tokens and 0 for padding, got fractions. A mask cannot weight "
            "tokens: pass mask > 0.",
        )
        attention_mask = attention_mask.long()
    if attention_mask is not None:
        check_values(
            (attention_mask <= 1).all(),
            "forward: attention_mask must be 1 for tokens and 0 for padding, got greater values, which collators write "
            "for packed documents. Pass these documents' bounds as cu_seqlens, or position_ids and no mask.",
        )
    return attention_mask


class LigerForCausalLM(Adaptable, Checkpoint, LigerPreTrainedModel, EngineGenerationMixin):
    """A language model with its head. `liger_models.hf` has a derived class for each model type.

    Args:
        config: configuration for the transformers class with the same name.
        decoder: a model of this package. By default, a new model with random weights.
        kernels: the parts of a new model that run on fused kernels.
    """

    accepts_loss_kwargs = True
    """Tells Trainer to pass ``num_items_in_batch``."""
    has_own_head = False
    """Whether a user has replaced the head by a module that returns only logits, without a loss."""

    def __init__(
        self, config: PreTrainedConfig, decoder: CausalLM | None = None, kernels: KernelOptions | None = None
    ) -> None:
        if decoder is None:
            config = copy.deepcopy(config)  # the caller may build other models from the same configuration
        super().__init__(config)
        if decoder is None:
            decoder = get_arch(config.model_type)(to_liger(config), kernels)
        self.model = LigerModel(config, decoder)
        self.loss_type = LOSS_TYPE
        self._no_split_modules = {type(block).__name__ for block in decoder.blocks}
        self.post_init()

    @property
    def lm_head(self) -> Any:
        """The head, which computes logits from hidden states."""
        return self.model.decoder.lm_head

    def __setattr__(self, name: str, value: Any) -> None:
        # The body applies edits of the configuration, so it must have the same configuration.
        if name == "config" and "model" in self._modules:
            self.model.config = value
        if name == "forward":
            value = fused_forward(self, value)
        if name != "lm_head" or self.tree is not None:
            super().__setattr__(name, value)
            return
        # nn.Module would register the new head in this module, where the property `lm_head` would hide the new head.
        replace_layer(self.model.decoder, name, value, "set_output_embeddings")
        self.has_own_head = not isinstance(value, Layer)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the children. The head is included only if PEFT calls this method to freeze all children."""
        yield from super().named_children()
        if self.tree is None and sys._getframe(1).f_globals.get("__name__") == "peft.peft_model":
            yield "lm_head", self.lm_head

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters.

        If OpenRLHF calls this method, the iterator yields the tensors of a checkpoint instead, because OpenRLHF sends
        them to vLLM.

        Raises:
            ValueError: OpenRLHF calls this method, and ZeRO-3 has partitioned the parameters.
        """
        parameters: Iterator[tuple[str, nn.Parameter]] = super().named_parameters(prefix, recurse, remove_duplicate)
        if sys._getframe(1).f_globals.get("__name__") != "openrlhf.trainer.ray.ppo_actor":
            return parameters
        if any(hasattr(parameter, "ds_id") for _, parameter in parameters):
            raise ValueError(
                "named_parameters: vLLM needs whole parameters, got parameters that ZeRO-3 has partitioned. Set "
                "--ds.zero_stage 2."
            )
        tensors = hf_tensors(self.model.decoder)
        return ((name, nn.Parameter(tensor)) for name, tensor in tensors)

    @property
    def has_own_loss(self) -> bool:
        """Whether a user has replaced the loss function or the head, so that the loss must be computed from logits."""
        return "_loss_function" in vars(self) or self.loss_type != LOSS_TYPE or self.has_own_head

    @with_stored_signature
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | float | None = None,
        **inputs: Any,
    ) -> Any:
        """Compute the logits, and the loss if ``labels`` are given.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, cached + T], 0 for padding.
            position_ids: [B, T] or [1, T]. Without a mask and a cache, each position 0 starts a packed document. For
                models with positions in time, height and width, the shape may also be [3, B, T], or [4, B, T] if the
                positions in the text come first.
            past_key_values: the cache that an earlier forward returned, or transformers' ``DynamicCache``, which is
                filled in place.
            inputs_embeds: [B, T, C], embeddings that replace ``input_ids``.
            labels: [B, T] int64, unshifted; −100 is ignored.
            use_cache: whether to create and return a cache if the caller passes none. By default, the configuration
                decides, except in training, where the default is False. With labels or packed documents, no cache is
                created.
            output_attentions: must be False.
            output_hidden_states: whether to return the hidden states before each block and after the last norm.
            output_router_logits: whether to return the router logits and to add their auxiliary loss. By default, the
                configuration decides.
            return_dict: whether to return an output object instead of a tuple.
            logits_to_keep: number n; only the logits of the last n tokens of each row are returned, or the logits of
                all tokens if n is 0. Alternatively, the indices of the tokens whose logits are returned.
            num_items_in_batch: number by which the summed loss is divided. A custom loss function gets it as an
                argument.
            inputs: pixels and the tensors that describe them; ``cu_seq_lens_q`` and related arguments, or
                ``cu_seqlens``; ``routed_experts`` [B, T, H or L, K] (the experts of each token, see `select_routing`);
                ``shift_labels`` [B, T] (shifted labels that replace ``labels``); ``skip_logits`` (whether to omit the
                logits if there are labels; by default, they are omitted in training with gradients).

        Returns:
            ``MoeCausalLMOutputWithPast``; without ``return_dict`` a tuple.

        Raises:
            ValueError: attention weights are requested, or ``past_key_values`` is another kind of cache; otherwise as
                for `Decoder.forward`.
        """
        shifted, skip = inputs.pop("shift_labels", None), inputs.pop("skip_logits", None)
        decoder, text = self.model.decoder, self.config.get_text_config()
        prepared, cache = self.model.prepare(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_attentions,
            inputs, has_labels=labels is not None or shifted is not None,
        )  # fmt: skip
        # The decoder's configuration decides whether to add the auxiliary loss, so the argument is written into it.
        with_routers = _resolve(output_router_logits, text, "output_router_logits")
        if getattr(decoder.config, "output_router_logits", with_routers) != with_routers:
            decoder.config = dataclasses.replace(decoder.config, output_router_logits=with_routers)
        all_hidden = _resolve(output_hidden_states, self.config, "output_hidden_states")
        # The mask of the new tokens; [B, cached + T] -> [B, T].
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        mask = prepared["attention_mask"]
        mask = None if mask is None else mask[:, -tokens.shape[1] :]

        if cache is not None and labels is not None and shifted is None:
            # The decoder does not shift labels after cached tokens, so they are shifted here.
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            if mask is not None:
                padding = mask == 0
                shifted = shifted.masked_fill(padding | padding.roll(-1, 1), -100)
            skip = self.training and torch.is_grad_enabled() if skip is None else skip
        own_loss = self.has_own_loss and (labels is not None or shifted is not None)
        if isinstance(logits_to_keep, Tensor) or shifted is not None or own_loss:
            # The decoder does not support these arguments. Let it return hidden states [B, T, C], and call the head
            # here.
            if labels is not None and shifted is None and not own_loss:
                raise ValueError("forward: labels exclude a tensor as logits_to_keep. Omit one.")
            out = decoder(**prepared, return_logits=False, output_hidden_states=all_hidden)
            hidden = out.hidden_states[-1]
            loss = None
            if own_loss:
                logits = self.lm_head(hidden)  # [B, T, V]
                given = {"shift_labels": shifted, "num_items_in_batch": num_items_in_batch}
                given = {name: value for name, value in given.items() if value is not None}
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **given)
            elif shifted is not None:
                loss, logits = self.lm_head(hidden, shifted, num_items=num_items_in_batch, return_logits=not skip)
            else:
                logits = self.lm_head(hidden[:, logits_to_keep])
            aux_loss = decoder.auxiliary_loss([*out.router_logits], mask)
            if loss is not None and aux_loss is not None:
                targets = labels[:, 1:] if shifted is None else shifted  # type: ignore[index]
                share = 1 if num_items_in_batch is None else decoder.groups.share_of_step(targets, num_items_in_batch)
                loss = loss + share * aux_loss
            out = out._replace(loss=loss, logits=logits, aux_loss=aux_loss)
        elif labels is None:
            # Compute only the logits.
            out = decoder(**prepared, logits_to_keep=logits_to_keep, output_hidden_states=all_hidden)
        else:
            # Compute the loss. In evaluation, also compute the logits, which cost memory.
            skip = self.training and torch.is_grad_enabled() if skip is None else skip
            out = decoder(
                **prepared, labels=labels, num_items_in_batch=num_items_in_batch, return_logits=not skip,
                logits_to_keep=logits_to_keep, output_hidden_states=all_hidden,
            )  # fmt: skip

        # The loss includes the weighted auxiliary loss, but transformers returns the auxiliary loss without the weight.
        # If the weight is 0, the decoder returns 0 as the auxiliary loss. With a cache, the decoder returns None.
        weight, aux_loss = getattr(decoder.config, "router_aux_loss_coef", 1.0), out.aux_loss
        if aux_loss is not None and weight:
            aux_loss = aux_loss / weight
        elif out.router_logits and getattr(decoder.config, "output_router_logits", False):
            aux_loss = decoder.balancing_loss(out.router_logits, mask)
        outputs = MoeCausalLMOutputWithPast(
            loss=out.loss,
            aux_loss=aux_loss,
            logits=out.logits,
            past_key_values=None if cache is None else cache.returned(),
            hidden_states=out.hidden_states if all_hidden else None,
            router_logits=out.router_logits if with_routers and out.router_logits else None,
        )
        return outputs if _resolve(return_dict, self.config, "return_dict") else outputs.to_tuple()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Map the name of the head's weight to the name of the embedding's weight; {} if the weights are not tied."""
        # Read the configuration, not the weights: the configuration may have been edited, and `tie_weights` calls this
        # method before it ties the weights.
        tied = to_liger(self.config).tie_word_embeddings
        return {"model.decoder.lm_head.weight": "model.decoder.embed_tokens.weight"} if tied else {}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any, **options: Any
    ) -> None:
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            # For a Mamba model, transformers looks for the cache under another name, and would create a second
            # cache.
            found = model_kwargs | {"cache_params": cache}
            super()._prepare_cache_for_generation(generation_config, found, *others, **options)
        # The cache is the same for every `cache_implementation`, and has no fixed size.
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = LigerCache(is_unused=True)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Raise an error, because transformers' continuous batching has a paged cache that needs other kernels.

        ``generate_batch`` calls this method, and therefore raises the same error.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{type(self).__name__}: continuous batching needs the paged attention of transformers' own classes. Call "
            "generate on a padded batch, or model.model.decoder.rollout(prompts)."
        )

    @with_stored_signature
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of the forward for the next tokens.

        Pixels are passed only with the first tokens. Longrope uses other rotary frequencies beyond a certain sequence
        length. When a row exceeds this length, the cache is dropped, because its keys were rotated with the old
        frequencies.
        """
        decoder = self.model.decoder
        for name in ("tokenizer", "assistant_tokenizer"):  # generate does not remove these if stop_strings is given
            kwargs.pop(name, None)
        # Beyond the original length, longrope rotates all keys of a row differently, so the cached keys become invalid.
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        has_mask = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        counted: Any = attention_mask if has_mask else torch.ones_like(input_ids)
        for length in {layer.switch_length for layer in layers_of(decoder.rotary)} - {None} if past else ():
            before, now = (counted[:, :end].sum(1) for end in (past, counted.shape[1]))
            if bool(((before <= length) & (now > length)).any()):
                past_key_values, next_sequence_length = None, None
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        # Pixels belong to the prompt, so pass them if the cache is empty, and in every forward without a cache. For a
        # draft model, no iteration counts as the first, so transformers would omit the pixels.
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        pixels = {name: kwargs[name] for name in decoder.prompt_inputs if kwargs.get(name) is not None}
        if is_first_iteration or past == 0 or not kwargs.get("use_cache", True):
            return pixels | prepared
        return {name: value for name, value in prepared.items() if name not in decoder.prompt_inputs}

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        decoder: Any = self.model.decoder
        pixels = {name: value for name, value in model_kwargs.items() if name in decoder.prompt_inputs}
        if input_ids is not None:
            pixels = decoder.complete_inputs(input_ids, pixels)
        others = {name: value for name, value in model_kwargs.items() if name not in pixels}
        # The first dimension of pixels is the number of images, not of prompts. For each repetition of a prompt, repeat
        # all images of the prompt.
        repeated = pixels
        if expand_size > 1 and any(value is not None for value in pixels.values()):
            if input_ids is None:
                raise ValueError("generate: pixels need input_ids, which say where the images are.")
            repeated = decoder.repeat_prompts(input_ids, pixels, expand_size)
        input_ids, others = super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **others)
        return input_ids, others | repeated

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *rest: Any, **options: Any
    ) -> dict[str, Any]:
        # Token types belong only to the prompt. transformers would repeat the last token type for each new token.
        types = model_kwargs.pop("token_type_ids", None)
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *rest, **options)
        return updated if types is None else {**updated, "token_type_ids": types}

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Any:
        # If positions depend on images, even on cached images, the decoder must compute the positions in each forward.
        if self.model.decoder.images_shift_positions:
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)


def _resolve(argument: bool | None, config: PreTrainedConfig, name: str) -> bool:
    """Return the argument or, if it is None, the value in the configuration."""
    return bool(getattr(config, name, False)) if argument is None else bool(argument)
