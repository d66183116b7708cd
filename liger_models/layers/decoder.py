"""The decoder that all families share: embedding -> blocks -> norm -> head or loss."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from liger_models.common.errors import check_tensors
from liger_models.common.foreign import foreign_arguments
from liger_models.distributed.groups import ParallelGroups
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.moe.load_balancing import load_balancing_loss
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.embedding import LigerEmbedding, zero_padding_row
from liger_models.layers.frozen import own_parameters
from liger_models.layers.head_request import HeadRequest, LossTargets, in_graph
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import (
    CHECKPOINTING_POLICIES,
    Layer,
    draw,
    is_replayable,
    layers_of,
    named_layers,
    routed_layers,
    set_policy,
)
from liger_models.layers.lm_head import LigerLMHead, LossFunction
from liger_models.layers.masks import takes_segments
from liger_models.layers.norm import LigerRMSNorm, Norm, add_norm
from liger_models.layers.offload import Offload, offloaded_blocks
from liger_models.layers.recompute import is_compiled, run_again
from liger_models.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from typing_extensions import Self


class CausalLMOutput(NamedTuple):
    """The result of `Decoder.forward`, with None for results that were not computed. ``out["loss"]`` is ``out.loss``.

    Attributes:
        loss: [] fp32, or the result of ``loss_function``.
        logits: [B, T, V] in the dtype of the weights.
        aux_loss: [], the part of ``loss`` that mixture-of-experts layers add; None with a decode cache.
        log_probs: [B, T] fp32, the log-probability of each token's target, 0 where it has none.
        hidden_states: tensors [B, T, C]. The last one is the input of the head; if requested, the inputs of all blocks
            precede it.
        router_logits: [B, T, X] for each layer with X routed experts; empty without such layers.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None
    log_probs: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        """A field by its name or index."""
        return self._asdict()[key] if isinstance(key, str) else tuple.__getitem__(self, key)


class CausalLMConfig(Protocol):
    """The config fields that the decoder reads."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


def take_cu_seqlens(cu_seqlens: Tensor | None, options: dict[str, Any]) -> Tensor | None:
    """Return ``cu_seqlens``, passed under its own name or under the names of transformers' collator in ``options``.

    Raises:
        ValueError: both are given, only a part of transformers' names is given, or a value is not a tensor.
    """
    q, k, *_ = (options.pop(f"{name}_{side}", None) for name in ("cu_seq_lens", "max_length") for side in "qk")
    check_tensors(cu_seqlens=cu_seqlens, cu_seq_lens_q=q)
    if q is not None and cu_seqlens is not None:
        raise ValueError("forward: cu_seqlens and cu_seq_lens_q are the same, got both. Pass one.")
    if k is not None and q is None:
        raise ValueError("forward: cu_seq_lens_k needs cu_seq_lens_q, got it alone. Pass both, or cu_seqlens.")
    return cu_seqlens if q is None else q


def check_policy(name: str, policy: str) -> None:
    """Raise ValueError unless ``policy`` is one of `CHECKPOINTING_POLICIES`."""
    if policy not in CHECKPOINTING_POLICIES:
        raise ValueError(f"set_checkpointing: {name} must be one of {CHECKPOINTING_POLICIES}, got {policy!r}.")


class Decoder(nn.Module):
    """A decoder with a language-model head.

    A subclass with a ``block_class`` is built by the ``build_`` methods, and overrides those that differ. A subclass
    without a ``block_class`` calls this constructor first, then sets the parts, and calls `post_init` last.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class: ClassVar[type[Any]]
    block_class: ClassVar[Any] = None
    """The class of the blocks, which is called with ``(config, layer, kernels)``."""
    layout_class: ClassVar[type[BatchLayout]] = BatchLayout
    """What `layout` builds; a family whose layers need more derives a class of its own."""
    prompt_inputs: ClassVar[tuple[str, ...]] = ()
    """Arguments of `forward` that belong to a prompt besides its tokens, such as pixels."""
    replays_routing: ClassVar[bool] = False
    """Whether blocks with routed experts give these layers `BatchLayout.experts`."""
    embed_tokens: LigerEmbedding
    layers: nn.ModuleList
    """Blocks: ``(x | None, residual, layout) -> (x | None, residual)``, where x is yet to be added to the residual
    stream. A block with routed experts also returns its router logits; others may return more, for `carry`."""
    norm: Norm
    lm_head: LigerLMHead
    rotary: nn.ModuleDict
    """Name -> `RotaryEmbedding`; an attention layer refers to its embedding by name."""

    def __init__(self, config: CausalLMConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__()
        self.config: Any = config
        self.kernels = kernels or KernelOptions()
        # What the backward recomputes, and what is kept in host memory meanwhile.
        self.checkpointing: str | list[str] = "none"
        self.recomputed: frozenset[int] = frozenset()
        """Blocks that are recomputed as a whole."""
        self.offloaded: frozenset[int] = frozenset()
        """Blocks whose activations are offloaded to host memory."""
        self.visual: Any = None
        """The vision tower, whose blocks are in ``visual.blocks``; None for models without one."""
        # How the model is distributed, and what its layers need of every batch.
        self.groups = ParallelGroups()
        """The process groups that the model is distributed over."""
        self._needs_bounds = False
        """Whether a layer reads `BatchLayout.bounds`; set by `post_init`."""
        self._windows: dict[int | None, bool] | None = None
        """Window of the attention layers -> whether one of these layers always needs a mask; set by `post_init`."""
        self._needs_flash: set[int | None] = set()
        """Windows of the attention layers that need a mask except in half precision."""
        # What came with the checkpoint and is saved with the next one.
        self.hf_config: dict[str, Any] = {}
        """The config.json that the model was loaded with. Keys that the model does not read are saved again."""
        self.assets: dict[str, bytes] = {}
        """Name -> content of files saved with the checkpoint unchanged: generation_config.json, tokenizer files."""
        self.kept_tensors: dict[str, Tensor] = {}
        """Name -> tensor of the checkpoint that belongs to no parameter, saved unchanged; in host memory, on rank 0."""
        self.trained_tensors: Callable[[], dict[str, Tensor]] = dict
        """Returns those of `kept_tensors` that a module beside the model trains, with their current values."""
        self.float8_tensors: frozenset[str] = frozenset()
        """The checkpoint's tensors in float8, of a model that was loaded with ``keep_float8``."""
        if self.block_class is not None:
            self.build(config)
            self.post_init()

    def build(self, config: Any) -> None:
        """Build the parts of the model, in the order of their parameters in the state dict."""
        self.visual = self.build_visual(config)
        self.embed_tokens = self.build_embedding(config)
        self.layers = self.build_blocks(config)
        self.norm = self.build_norm(config)
        self.lm_head = self.build_head(config)
        self.rotary = nn.ModuleDict(self.build_rotary(config))

    def build_visual(self, config: Any) -> nn.Module | None:
        """Build the vision tower; None for a model of text."""
        return None

    def build_embedding(self, config: Any) -> LigerEmbedding:
        """Build the embedding of the tokens."""
        return LigerEmbedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def build_blocks(self, config: Any) -> nn.ModuleList:
        """Build all blocks."""
        return nn.ModuleList(self.build_block(config, layer) for layer in range(config.num_hidden_layers))

    def build_block(self, config: Any, layer: int) -> nn.Module:
        """Build block number ``layer``."""
        block: nn.Module = self.block_class(config, layer, self.kernels)
        return block

    def build_norm(self, config: Any) -> Norm:
        """Build the norm after the last block."""
        return LigerRMSNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.rms_norm)

    def build_head(self, config: Any) -> LigerLMHead:
        """Build the language-model head."""
        return LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)

    def build_rotary(self, config: Any) -> dict[str, nn.Module]:
        """Build the rotary embeddings, under the names that attention layers use."""
        rotary = RotaryEmbedding(
            config.rotary_width, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        return {"default": rotary}

    def post_init(self) -> None:
        """Check the parts, and tie and initialize the weights. A constructor that sets its own parts calls this last.

        Raises:
            ValueError: a part is missing, the model has a buffer, or attention layers share a cache slot.
        """
        name = type(self).__name__
        parts = ("embed_tokens", "layers", "norm", "lm_head", "rotary")
        missing = [part for part in parts if not hasattr(self, part)]
        if missing:
            raise ValueError(
                f"{name}: must have {', '.join(missing)} when it calls post_init, got none. Set them first."
            )
        self.check_buffers()

        # What the layers need of every forward's layout: bounds of documents, and a mask for each window.
        self._windows = {}
        slots: dict[int, str] = {}  # slot in the decode cache -> path of the layer that has it
        for path, layer in named_layers(self.layers, remove_duplicate=False):
            self._needs_bounds = self._needs_bounds or layer.needs_bounds
            spec = layer.attention
            if spec is None:
                continue
            # A layer in two places would append to its slot twice.
            other = path if spec.cache_slot is None else slots.setdefault(spec.cache_slot, path)
            if other != path:
                raise ValueError(
                    f"{name}: each attention layer must have a slot of its own in the decode cache, got "
                    f"layer={spec.cache_slot} for layers.{other} and layers.{path}. Number them."
                )
            if spec.rotary is not None and spec.rotary not in self.rotary:
                raise ValueError(
                    f"{name}: rotary must have the embedding {spec.rotary!r} that layers.{path} uses, got "
                    f"{', '.join(self.rotary)}."
                )
            self._windows[spec.window] = self._windows.get(spec.window, False) or spec.needs_mask
            if spec.needs_flash:
                self._needs_flash.add(spec.window)

        self.tie_weights()
        if self.device.type != "meta":
            self.reset_parameters()

    def check_buffers(self) -> None:
        """Raise ValueError if the model has a buffer. Loading checks again, since subclasses may add buffers."""
        buffers = [buffer for buffer, _ in self.named_buffers()]
        if buffers:
            raise ValueError(
                f"{type(self).__name__}: must have no buffers, because checkpoints and the meta device lose them, got "
                f"{', '.join(buffers[:5])}. Make them parameters, or compute them from the config as "
                "layers.rope.RotaryEmbedding does."
            )

    def tie_weights(self) -> None:
        """Let the head share the weight of the embedding if the config says so."""
        if self.config.tie_word_embeddings and self.lm_head.weight is not self.embed_tokens.weight:
            self.lm_head.weight = self.embed_tokens.weight

    def reset_parameters(self) -> None:
        """Initialize all weights.

        The weights of linear layers and embeddings are drawn from a normal distribution with ``initializer_range``;
        biases and the embedding of the padding token are set to 0. Other layers initialize their parameters by
        `Layer.draw`, and all other modules by ``reset_parameters``, submodules first.

        Raises:
            ValueError: a module has parameters but no method ``reset_parameters``.
        """
        std = self.config.initializer_range
        # First what is drawn by a rule of its own; seeds give the same numbers in this order alone.
        drawn: set[nn.Module] = set()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
                drawn.add(module)
            elif draw(module, std):
                drawn.add(module)
        zero_padding_row(self.embed_tokens)  # after the head, which may share the weight

        # Then all other modules, submodules first, so that a module may change what its submodules have drawn.
        for name, module in reversed([*self.named_modules()]):
            if module in drawn:
                continue
            parameters = [parameter for parameter, _ in module.named_parameters(name, recurse=False)]
            reset = getattr(type(module), "reset_parameters", None)
            if parameters and reset in (None, Decoder.reset_parameters):
                raise ValueError(
                    f"{type(self).__name__}: {type(module).__name__} must have a method reset_parameters that "
                    f"initializes {', '.join(parameters)}, got none. Models are built on the meta device first, and "
                    "then initialized."
                )
            if reset is not None and module is not self:
                reset(module)

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """Context in which parameters may be replaced name by name; afterwards, shared parameters are shared again."""
        first_names: dict[int, str] = {}  # identity of a parameter -> its first name
        aliases = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first = first_names.setdefault(id(parameter), name)
            if first != name:
                aliases[name] = first
        yield
        for name, first in aliases.items():
            # The parameter under the first name may be a new one: set it again under the other names.
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, self.get_parameter(first))

    def _apply(self, fn: Any, recurse: bool = True) -> "Self":
        with self._sharing():  # moving from the meta device creates a new parameter for each name
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """`torch.nn.Module.load_state_dict`, except that shared parameters stay shared with ``assign``."""
        with self._sharing() if assign else nullcontext():
            return super().load_state_dict(state_dict, strict, assign)

    def current_assets(self) -> dict[str, bytes]:
        """The current content of the files that are saved with a checkpoint."""
        return self.assets

    def current_kept_tensors(self) -> dict[str, Tensor]:
        """The current values of the tensors that are saved with the checkpoint besides the parameters."""
        return self.kept_tensors | self.trained_tensors()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding's weight."""
        return self.embed_tokens.weight.dtype

    @property
    def blocks(self) -> list[Any]:
        """All blocks in execution order: the blocks of the vision tower, if there is one, then of the decoder."""
        return [*([] if self.visual is None else self.visual.blocks), *self.layers]

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of all or all trainable parameters, with or without the embedding; tied parameters count once."""
        excluded = self.embed_tokens.weight if exclude_embeddings else None
        # Keyed by the parameter, so that a tied one counts once.
        sizes = {weight: size for module in self.modules() for weight, size in own_parameters(module).items()}
        return sum(
            size
            for weight, size in sizes.items()
            if weight is not excluded and (weight.requires_grad or not only_trainable)
        )

    def hidden_matrices(self) -> dict[str, nn.Parameter]:
        """The weights of all linear layers except the head, and the stacked weights of experts, by name."""
        linear = {f"{path}.weight" for path, module in self.named_modules() if isinstance(module, nn.Linear)}
        # The matrices of all experts are one parameter [X, O, C], which belongs to no `nn.Linear`.
        routed = tuple(path for path, layer in named_layers(self) if layer.router is not None)
        return {
            name: weight
            for name, weight in self.named_parameters()
            if (name in linear and weight is not self.lm_head.weight)
            or (name.rpartition(".")[0] in routed and weight.dim() == 3)
        }

    def print_trainable_parameters(self) -> None:
        """Print the number of trainable parameters and of all parameters."""
        trainable, total = self.num_parameters(only_trainable=True), self.num_parameters()
        print(f"{trainable:,} of {total:,} parameters are trainable ({trainable / total:.3%})")

    def set_attention_dropout(self, probability: float) -> None:
        """Let the attention of every block drop its weights with this probability in training.

        The config keeps its own value, ``attention_dropout``, which is saved.

        Raises:
            ValueError: ``probability`` is not in [0, 1).
        """
        if not 0 <= probability < 1:
            raise ValueError(f"set_attention_dropout: probability must be in [0, 1), got {probability}.")
        for layer in layers_of(self.layers):
            layer.set_attention_dropout(probability)

    def set_checkpointing(self, policy: str | list[str], *, offload_layers: int = 0) -> None:
        """Choose which activations are saved for the backward, and where. The gradients are always the same.

        Args:
            policy: one policy for all blocks, or a list with a policy for each block. "none" saves all tensors that the
                fused ops need. "selective" recomputes the gate and up projections of the MLP, whose outputs are the
                largest activations. "full" saves only the block's input and recomputes the rest, except the last
                projection, whose output the backward does not need. With "full", blocks with routed experts also save
                the input of the experts, so that the backward cannot route differently, and compiled blocks and models
                also save the input of the MLP.
            offload_layers: number of blocks whose activations are offloaded to host memory, with copies that overlap
                the computation. The blocks are spread evenly and exclude the last two if possible, so that the copies
                have time during the other blocks. A compiled model does not support offloading; compiled blocks do.

        Raises:
            ValueError: a policy is unknown, the list does not have one policy for each block, or ``offload_layers``
                exceeds the number of blocks.
        """
        blocks = len(self.layers)
        policies = [policy] * blocks if isinstance(policy, str) else list(policy)
        if len(policies) != blocks:
            raise ValueError(
                f"set_checkpointing: policy must be one, or one for each of the {blocks} blocks, got {len(policies)}."
            )
        if not 0 <= offload_layers <= blocks:
            raise ValueError(f"set_checkpointing: offload_layers must be 0 to {blocks}, got {offload_layers}.")
        # All checks come before the first change.
        for block_policy in policies:
            check_policy("policy", block_policy)

        self.checkpointing = policy
        # Blocks whose second forward may differ recompute within their layers instead.
        self.recomputed = frozenset(
            index
            for index, (block, block_policy) in enumerate(zip(self.layers, policies, strict=True))
            if block_policy == "full" and is_replayable(block)
        )
        self.offloaded = offloaded_blocks(blocks, offload_layers)
        for block, block_policy in zip(self.layers, policies, strict=True):
            set_policy(block, block_policy)

    @foreign_arguments("forward")
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        return_logits: bool | None = None,
        return_log_probs: bool = False,
        loss_function: LossFunction | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        routed_experts: Tensor | None = None,
        cache: DecodeCache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> CausalLMOutput:
        """Compute logits, or the loss if ``labels`` are given, without materializing the logits.

        Args:
            input_ids: [B, T] int64.
            labels: [B, T] int64, unshifted; −100 is ignored. Padding and the last token of a row or of a packed
                document have no target.
            position_ids, attention_mask, cu_seqlens: see `BatchLayout.build`.
            inputs_embeds: [B, T, C] instead of ``input_ids``.
            num_items_in_batch: divisor of the summed loss, a number or a tensor of one element: the number of targets
                in all accumulation steps and on all ranks. It may be 0 only if this batch has no targets. Default: the
                number of targets in this batch. The auxiliary loss is multiplied by the number of targets in the batch
                divided by this number, so that the weights of all batches of a step add up to 1.
            return_logits: True returns logits in addition to the loss. The default returns logits only without
                ``labels``. False without ``labels`` skips the head, and returns its input in ``hidden_states``.
            return_log_probs: with ``labels``, return the log-probabilities of the targets instead of the loss, for
                custom losses. The targets are ``labels`` shifted by `BatchLayout.shift`.
            loss_function: with ``labels``, replaces the loss. It is called with ``(hidden, weight, target)``: the
                normed output of the last block [B, T, C], the head's weight [V, C] and the shifted labels [B, T]. It
                may return any object. It is called inside the head, where FSDP has gathered the weight. It must itself
                apply the model's softcap and logit scale, and ``aux_loss`` is not added to its result.
            logits_to_keep: number of last tokens whose logits are returned; 0 for all. Not with ``labels``.
            output_hidden_states: return the hidden states before each block and after the last norm.
            routed_experts: [B, T, L, K] integers, recorded by `rollout`: the K experts of each token in each of the L
                layers with routed experts. They replace the routers' choice (routing replay). The routers' logits still
                determine the weights of these experts, the routers' gradients and the auxiliary loss. For a token with
                negative numbers the routers choose.
            cache: decode cache, to which the tokens are appended.
            cu_seq_lens_q, cu_seq_lens_k: ``cu_seqlens`` under the two names that transformers'
                ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` gives the same tensor.
            max_length_q, max_length_k: ignored; accepted because that collator passes them.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: arguments exclude each other, or shapes or values are wrong; see `BatchLayout.build`.
        """
        cu_seqlens = take_cu_seqlens(cu_seqlens, {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k})
        embeds, layout = self.prepare(
            input_ids, position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens,
            inputs_embeds=inputs_embeds, cache=cache,
        )  # fmt: skip
        return self.run(
            embeds, layout, labels=labels, num_items_in_batch=num_items_in_batch, return_logits=return_logits,
            return_log_probs=return_log_probs, loss_function=loss_function, logits_to_keep=logits_to_keep,
            output_hidden_states=output_hidden_states, routed_experts=routed_experts,
        )  # fmt: skip

    def prepare(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
    ) -> tuple[Tensor, BatchLayout]:
        """Return the arguments of `run`: the embeddings of this rank's tokens, and the layout of the batch.

        Args: as in `forward`.
        """
        embeds, shape = self.embed(input_ids, inputs_embeds)
        layout = self.layout(
            shape, embeds, position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache,
            **self.layout_inputs(input_ids, embeds, shape[1]),
        )  # fmt: skip
        return embeds, layout

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[Tensor, tuple[int, int]]:
        """Return the embeddings of this rank's share of the tokens, and the shape (B, T) of the whole batch."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("forward: exactly one of input_ids and inputs_embeds must be given.")
        check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds)
        if inputs_embeds is not None:
            return inputs_embeds, (inputs_embeds.shape[0], inputs_embeds.shape[1])
        assert input_ids is not None
        if input_ids.dim() != 2:
            raise ValueError(f"forward: input_ids must be [B, T], got {list(input_ids.shape)}.")
        B, T = input_ids.shape
        self.groups.check_tokens(T, whole=False)
        return self.embed_tokens(self.groups.context_share(input_ids)), (B, T)

    def layout_inputs(self, input_ids: Tensor | None, embeds: Tensor, T: int) -> dict[str, Any]:
        """Values of the fields that ``layout_class`` adds, for rows of T tokens; ``embeds`` is this rank's share."""
        return {}

    def stand_ins(self, layout: BatchLayout, like: Tensor) -> BatchLayout:
        """The layout with stand-ins for the tensors that other blocks add to it, so that a block runs alone.

        Args:
            layout: as `layout` returns it.
            like: [B, T, C], the residual stream, whose dtype the stand-ins have.
        """
        return layout

    @property
    def held_elements(self) -> int:
        """Number of elements per token that the forward holds for the backward outside the blocks."""
        return 0

    def carry(self, index: int, more: list[Tensor], layout: BatchLayout) -> tuple[list[Tensor], BatchLayout]:
        """Return the router logits of a block, and the layout for the blocks after it.

        Args:
            index: index of the block.
            more: the block's results after x and the stream.
            layout: the layout that was passed to the block.
        """
        return more, layout

    def layout(self, shape: tuple[int, int], embeds: Tensor, **options: Any) -> BatchLayout:
        """Build the layout of a batch of ``shape`` (B, T), with options as in `BatchLayout.build`."""
        if self._windows is None:
            raise ValueError(
                f"{type(self).__name__}: the constructor must end with self.post_init(), got no call of it. Add it."
            )
        rotary: dict[str, Any] = dict(self.rotary.items())
        windows = self._windows
        # Sinks have a fused kernel in half precision; elsewhere their layers need a mask.
        if embeds.device.type in ACCELERATORS and not takes_segments(embeds.device, embeds.dtype):
            windows = {window: needed or window in self._needs_flash for window, needed in windows.items()}
        return self.layout_class.build(
            shape, embeds.device, rotary, windows=windows, needs_bounds=self._needs_bounds, dtype=embeds.dtype,
            **options,
        )  # fmt: skip

    def run(self, embeds: Tensor, layout: BatchLayout, **options: Any) -> CausalLMOutput:
        """Run blocks, norm, head and loss.

        Args:
            embeds: [B, T, C], or only this rank's share of the tokens.
            layout: layout of the whole batch.
            options: the arguments of `forward` that are fields of `HeadRequest`.
        """
        request = HeadRequest.of(options)
        cache, groups, T = layout.cache, self.groups, layout.position_ids.shape[-1]
        request.check(embeds.shape[0], T, cached=cache is not None)
        groups.check_tokens(T, whole=cache is not None or request.needs_all_tokens)

        # This rank's share of the experts to take, of the tokens and of the targets.
        if request.routed_experts is not None:
            experts = self._share_experts(request.routed_experts.to(embeds.device), embeds.shape[0], T)
            layout = replace(layout, experts=experts)
        if embeds.shape[1] == T:
            embeds = groups.token_share(embeds)  # [B, T / R, C]
        targets = None if request.labels is None else LossTargets.of(request, layout, groups, embeds)

        # Blocks and norm.
        states: list[Tensor] = []
        collect = [states] if request.output_hidden_states else []
        hidden, router_logits = self.run_blocks(embeds, layout, *collect)
        hidden = groups.enter_head(hidden)  # [B, T, C], under context parallelism [B, T / R, C]
        # A dictionary, because torch 2.11 does not compile `_replace` of a named tuple.
        output: dict[str, Any] = {"router_logits": tuple(router_logits)}
        if request.output_hidden_states or request.without_head:
            output["hidden_states"] = (*states, hidden)

        # The head, and the loss in it.
        loss: Any = None
        logits: Any = None
        if not request.without_head:
            loss, logits = self._apply_head(hidden, request, targets)
        if cache is not None:  # last, so that a forward that fails in the head leaves the cache as it was
            cache.advance(T)
        if request.without_head:
            return CausalLMOutput(**output)
        aux_loss = None if cache is not None else self._shared_auxiliary_loss(router_logits, layout, request, targets)
        output |= {"logits": groups.gather_logits(logits), "aux_loss": aux_loss}
        if request.return_log_probs:
            return CausalLMOutput(**output, log_probs=groups.gather_log_probs(loss))
        if loss is not None and request.loss_function is None:
            loss = groups.sum_loss(loss)
            loss = loss if aux_loss is None else loss + aux_loss
        return CausalLMOutput(**output, loss=loss)

    def _apply_head(self, hidden: Tensor, request: HeadRequest, targets: LossTargets | None) -> tuple[Any, Any]:
        """Return the loss (or the log-probabilities of the targets) and the logits of this rank's tokens."""
        if targets is None:
            kept = request.logits_to_keep
            return None, self.lm_head(hidden[:, -kept:] if kept else hidden)
        target = targets.local  # [B, T / R]
        if targets.rows is not None:
            hidden, target = targets.rows.select(hidden)  # [n, C] and [n], unless all rows are needed
        loss, logits = self.lm_head(
            hidden,
            target,
            num_items=targets.num_items,
            return_logits=bool(request.return_logits),
            log_probs=request.return_log_probs,
            loss_function=request.loss_function,
        )
        return loss, logits

    def _shared_auxiliary_loss(
        self, router_logits: list[Tensor], layout: BatchLayout, request: HeadRequest, targets: LossTargets | None
    ) -> Tensor | None:
        """`auxiliary_loss`, times the share of the step's targets that are in this batch."""
        mask = None if layout.attention_mask is None else self.groups.context_share(layout.attention_mask)
        aux_loss = self.auxiliary_loss(router_logits, mask)
        if aux_loss is None or targets is None or request.num_items_in_batch is None:
            return aux_loss
        return self.groups.share_of_step(targets.shifted, request.num_items_in_batch) * aux_loss

    @property
    def routers(self) -> list[Layer]:
        """The layers with routed experts, in the order of ``router_logits``."""
        return routed_layers(self.layers)

    def choose_experts(self, router_logits: Sequence[Tensor]) -> Tensor:
        """The experts that the layers choose for the router logits of a forward: [N, L, K] int16, N = B · T."""
        chosen = [layer.choose(logits) for layer, logits in zip(self.routers, router_logits, strict=True)]
        return torch.stack(chosen, 1).to(torch.int16)

    def _share_experts(self, experts: Tensor, B: int, T: int) -> tuple[Tensor, ...]:
        """This rank's share of ``routed_experts``, [B, T / R, K] for each layer."""
        routers, name = self.routers, type(self).__name__
        if not routers:
            raise ValueError(f"forward: routed_experts need layers with routed experts, got {name} without any.")
        if not self.replays_routing:
            raise ValueError(
                f"forward: routed_experts need blocks that give their experts layout.experts, got {name}, whose "
                "replays_routing is False. Give them, and set it to True."
            )
        shape = [B, T, len(routers), routers[0].top_k]
        if list(experts.shape) != shape:
            raise ValueError(
                f"forward: routed_experts must be {shape} (rows, tokens, layers with experts, experts of a token), got "
                f"{list(experts.shape)}."
            )
        share = self.groups.token_share(experts.flatten(2))
        parts: tuple[Tensor, ...] = share.unflatten(2, shape[2:]).unbind(2)
        return parts

    def _by_block(self, experts: Sequence[Tensor]) -> dict[int, tuple[Tensor, ...]]:
        """Map the index of a block to the tensors of its layers with routed experts; ``experts`` has one per layer."""
        left = iter(experts)
        routers = map(routed_layers, self.layers)
        return {index: tuple(next(left) for _ in layers) for index, layers in enumerate(routers) if layers}

    def run_blocks(
        self, embeds: Tensor, layout: BatchLayout, states: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the normed output of the last block, [B, T, C], and the router logits of all blocks.

        The residual stream before each block, [B, T, C], is appended to ``states``.
        """
        offload = Offload() if self.offloaded and torch.is_grad_enabled() else None
        if offload is not None and torch.compiler.is_compiling():
            raise ValueError(
                "forward: offload_layers must be 0 in a compiled model. Compile the blocks instead, or don't set it."
            )
        # With a decode cache a recomputed block would append to it again.
        once = not torch.is_grad_enabled() or layout.cache is not None or in_graph(embeds)
        recomputed: frozenset[int] = frozenset() if once else self.recomputed
        # A block is given the experts of its own layers.
        experts: dict[int, tuple[Tensor, ...]] = {}
        if layout.experts:
            experts, layout = self._by_block(layout.experts), replace(layout, experts=())

        # x [B, T, C] is yet to be added to the stream: the norm of the next block adds it in its kernel.
        x: Tensor | None = None
        residual = embeds
        router_logits: list[Tensor] = []
        for index, block in enumerate(self.layers):
            if states is not None:
                # The input of a block is the stream with the pending branch added.
                states.append(residual if x is None else residual + x)
            run: Any = block
            if index in recomputed and not is_compiled(block):
                run = functools.partial(run_again, block)
            block_layout = replace(layout, experts=experts[index]) if index in experts else layout
            with offload.saving(index in self.offloaded) if offload else nullcontext():
                x, residual, *more = run(x, residual, block_layout)
            block_logits, layout = self.carry(index, more, layout)
            router_logits += block_logits
            residual = self.after_block(index, residual, layout)
        if offload:
            offload.settle()
        hidden, _ = add_norm(self.norm, x, residual)
        return hidden, router_logits

    def after_block(self, index: int, residual: Tensor, layout: BatchLayout) -> Tensor:
        """The residual stream [B, T, C] after a block. Families that add something between blocks override this."""
        return residual

    def prompt_positions(self, prompts: Tensor, mask: Tensor | None, new: int, inputs: dict[str, Any]) -> Tensor:
        """Positions of prompts and of the tokens generated after them.

        Args:
            prompts: [B, T] int64.
            mask: [B, T], 0 for padding on the left, which is not counted; None for no padding.
            new: number of tokens to generate.
            inputs: other arguments of `forward` that belong to the prompts; see `prompt_inputs`.

        Returns:
            [1 or B, T + new] int64, or [3, 1 or B, T + new] in time, height and width.
        """
        T = prompts.shape[1] + new
        if mask is None:
            return torch.arange(T, device=prompts.device)[None]
        return (nn.functional.pad(mask, (0, new), value=1).cumsum(1) - 1).clamp_min(0)

    def auxiliary_loss(self, router_logits: list[Tensor], attention_mask: Tensor | None) -> Tensor | None:
        """The weighted loss that is added to the cross entropy, or None.

        It is the load-balancing loss of all layers with routed experts together, if the config enables it.
        """
        if not (router_logits and getattr(self.config, "output_router_logits", False)):
            return None
        loss = load_balancing_loss(router_logits, self.config.num_experts_per_tok, attention_mask, self.groups.balance)
        weighted: Tensor = self.config.router_aux_loss_coef * loss
        return weighted
