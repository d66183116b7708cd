"""The decoder that all families share: embedding -> blocks -> norm -> head or loss."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from liger_models.common.device import empty_on
from liger_models.common.errors import check_tensors
from liger_models.common.foreign import foreign_arguments
from liger_models.distributed.groups import ParallelGroups
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.kernels.moe.load_balancing import load_balancing_loss
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.compile_ahead import compile_ahead
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
from liger_models.layers.recompute import can_run_again, run_again
from liger_models.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class QuantizedCheckpoint:
    """The parts of a quantized checkpoint that `save_pretrained` writes again, together with the weights of a model.

    All parts are empty unless the model was loaded with ``keep_quantized``.

    Attributes:
        config: the ``quantization_config`` of the checkpoint.
        encodings: maps the name of each quantized tensor of the checkpoint to the way in which it is stored.
        extras: tensors that do not change a weight, such as scales of activations. Only rank 0 has them.
        kept: for each tensor in `Decoder.kept_tensors` that is quantized in the checkpoint, the tensors that store
            it in the files, by name. Only rank 0 has them.
    """

    config: dict[str, Any] = field(default_factory=dict)
    encodings: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class CausalLMOutput(NamedTuple):
    """The result of `Decoder.forward`. Values that were not computed are None. ``out["loss"]`` is ``out.loss``.

    Attributes:
        loss: [] fp32, or the result of ``loss_function``.
        logits: [B, T, V] in the dtype of the weights.
        aux_loss: [], the part of ``loss`` that comes from mixture-of-experts layers; None if there was a decode cache.
        log_probs: [B, T] fp32, the log-probability of each token's target, or 0 for a token without a target.
        hidden_states: tensors [B, T, C]. The last one is the input of the head. If ``output_hidden_states`` was
            requested, the inputs of all blocks come before it.
        router_logits: a tensor [B, T, X] for each layer with X routed experts; empty if there are no such layers.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None
    log_probs: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        """Return a field by its name or index."""
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
    """Return ``cu_seqlens``. If ``cu_seqlens`` is None, return the tensor with the same content that transformers'
    collator passes under other names, in ``options``.

    Raises:
        ValueError: ``cu_seqlens`` is given under both names, some of the collator's names are missing, or a value is
            not a tensor.
    """
    q, k = options.pop("cu_seq_lens_q", None), options.pop("cu_seq_lens_k", None)
    for name in ("max_length_q", "max_length_k"):  # not needed
        options.pop(name, None)
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

    If a subclass sets ``block_class``, the ``build_`` methods build the parts of the model, and the subclass overrides
    the methods for parts that differ from the defaults. A subclass without ``block_class`` calls this constructor
    first, then sets the parts itself, and calls `post_init` last.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; by default all of them.
    """

    config_class: ClassVar[type[Any]]
    block_class: ClassVar[Any] = None
    """The class of the blocks. It is called with ``(config, layer, kernels)``."""
    layout_class: ClassVar[type[BatchLayout]] = BatchLayout
    """The class of the result of `layout`. A family whose layers need further tensors derives its own class."""
    prompt_inputs: ClassVar[tuple[str, ...]] = ()
    """Arguments of `forward` that belong to a prompt in addition to its tokens, such as pixels."""
    prompts_are_causal: ClassVar[bool] = True
    """Whether the tokens of a prompt attend only to earlier tokens, so that a prompt may be computed in pieces."""
    images_shift_positions: ClassVar[bool] = False
    """Whether images shift the positions of the tokens after them. If so, the decode cache keeps the shift."""
    replays_routing: ClassVar[bool] = False
    """Whether blocks pass `BatchLayout.experts` to their layers with routed experts."""
    embed_tokens: LigerEmbedding
    layers: nn.ModuleList
    """Blocks, called as ``(x | None, residual, layout) -> (x | None, residual)``.

    ``residual`` is the residual stream, and ``x`` is a branch's output that is still to be added to it. A block may
    return further tensors for `carry`, such as router logits.
    """
    norm: Norm
    lm_head: LigerLMHead
    rotary: nn.ModuleDict
    """Maps a name to a `RotaryEmbedding`. An attention layer refers to its rotary embedding by name."""

    def __init__(self, config: CausalLMConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__()
        self.config: Any = config
        self.kernels = kernels or KernelOptions()
        # What the backward recomputes, and what is offloaded to host memory until the backward.
        self.checkpointing: str | list[str] = "none"
        self.recomputed: frozenset[int] = frozenset()
        """Indices of the blocks that are recomputed as a whole."""
        self.offloaded: frozenset[int] = frozenset()
        """Indices of the blocks whose activations are offloaded to host memory."""
        self.visual: Any = None
        """The vision tower, whose blocks are in ``visual.blocks``; None for text models."""
        self.groups = ParallelGroups()
        """The process groups that the model is distributed over."""
        self.has_head = True
        """False for a model that computes text embeddings and is saved without a head. `lm_head` then has the
        embedding's weight.
        """
        self.bidirectional = False
        """Whether each token attends to all tokens of its document; see `set_bidirectional`."""
        # What the layers need from the layout of every batch.
        self.needs_bounds = False
        """Whether any layer reads `BatchLayout.bounds`; set by `post_init`."""
        self._windows: dict[int | None, bool] | None = None
        """Maps each window to a bool: whether a layer with this window always needs a mask; set by `post_init`."""
        self._chunks: set[int] = set()
        """Chunk sizes of the attention layers."""
        self._needs_flash: set[int | None] = set()
        """Windows of the attention layers that need a mask in dtypes other than half precision."""
        # Parts of the loaded checkpoint that are saved with the next checkpoint.
        self.hf_config: dict[str, Any] = {}
        """The content of the loaded config.json. Keys that the model does not read are saved again."""
        self.assets: dict[str, bytes] = {}
        """Maps file names to contents that are saved unchanged, such as generation_config.json and tokenizer files."""
        self.kept_tensors: dict[str, Tensor] = {}
        """Checkpoint tensors, by name, that belong to no parameter and are saved unchanged. Only rank 0 has them (on
        the CPU).
        """
        self.trained_tensors: Callable[[], dict[str, Tensor]] = dict
        """Function that returns the current values of those `kept_tensors` that a separate module trains."""
        self.read_dtypes: dict[str, torch.dtype] = {}
        """The dtypes that the parameters named in `Layer.wide` have in the checkpoint that the model was loaded
        from.
        """
        self.quantized = QuantizedCheckpoint()
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
        """Build the vision tower; return None for a text model."""
        return None

    def build_embedding(self, config: Any) -> LigerEmbedding:
        """Build the token embedding."""
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
        """Build the rotary embeddings, and return them in a dict. The key of a rotary embedding is the name by which
        attention layers refer to it."""
        rotary = RotaryEmbedding(
            config.rotary_width, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        return {"default": rotary}

    def post_init(self) -> None:
        """Check the parts of the model, and tie and initialize the weights.

        A constructor that sets the parts of the model calls this method last.

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

        # Collect what the layers need from the layout of each forward: bounds of documents, and a mask for each window.
        self._windows = {}
        slots: dict[int, str] = {}  # maps a slot in the decode cache to the path of its layer
        for path, layer in named_layers(self.layers, remove_duplicate=False):
            self.needs_bounds = self.needs_bounds or layer.needs_bounds
            spec = layer.attention
            if spec is None:
                continue
            # A layer that is used in two places would append to its slot twice.
            slot_owner = path if spec.cache_slot is None else slots.setdefault(spec.cache_slot, path)
            if slot_owner != path:
                raise ValueError(
                    f"{name}: each attention layer must have a slot of its own in the decode cache, got "
                    f"layer={spec.cache_slot} for layers.{slot_owner} and layers.{path}. Number them."
                )
            if spec.rotary is not None and spec.rotary not in self.rotary:
                raise ValueError(
                    f"{name}: rotary must have the embedding {spec.rotary!r} that layers.{path} uses, got "
                    f"{', '.join(self.rotary)}."
                )
            self._windows[spec.window] = self._windows.get(spec.window, False) or spec.needs_mask
            if spec.chunk is not None:
                self._chunks.add(spec.chunk)
            if spec.needs_flash:
                self._needs_flash.add(spec.window)

        self.tie_weights()
        if self.device.type != "meta":
            self.initialize()

    def initialize(self) -> None:
        """Call `reset_parameters`, and check that it initializes every parameter.

        Raises:
            ValueError: a parameter is not initialized.
        """
        # Write NaN into the first element of each parameter. A parameter that still has it afterwards was not
        # initialized.
        first_elements = {
            name: weight.data[(0,) * weight.dim()]
            for name, weight in self.named_parameters()
            if weight.is_floating_point() and weight.numel() and not weight.is_meta
        }
        for element in first_elements.values():
            element.fill_(float("nan"))
        self.reset_parameters()
        for name, weight in self.named_parameters():
            first = first_elements.get(name)
            # A parameter with new memory has been replaced by an initialized one.
            if first is None or first.data_ptr() != weight.data_ptr() or not first.float().isnan():
                continue
            owner = type(self.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"{type(self).__name__}: {owner} must have a method reset_parameters that initializes {name}, got one "
                "that leaves it without values, or none. Models are built on the meta device first, and then "
                "initialized."
            )

    def check_buffers(self) -> None:
        """Raise ValueError if the model has a buffer. Loading repeats this check, because subclasses may add buffers
        later."""
        buffers = [buffer for buffer, _ in self.named_buffers()]
        if buffers:
            raise ValueError(
                f"{type(self).__name__}: must have no buffers, because checkpoints and the meta device lose them, got "
                f"{', '.join(buffers[:5])}. Make them parameters, or compute them from the config as "
                "layers.rope.RotaryEmbedding does."
            )

    def tie_weights(self) -> None:
        """Make the head share the weight of the embedding if the config requires it."""
        if self.config.tie_word_embeddings and self.lm_head.weight is not self.embed_tokens.weight:
            self.lm_head.weight = self.embed_tokens.weight

    def reset_parameters(self) -> None:
        """Initialize all weights.

        The weights of linear layers and embeddings are drawn from a normal distribution with the standard deviation
        ``initializer_range``. Biases and the embedding of the padding token are set to 0. Other layers initialize their
        parameters in `Layer.draw`. All other modules initialize their parameters in ``reset_parameters``, submodules
        first. If a subclass of a linear layer, an embedding or a `Layer` defines its own ``reset_parameters``, that
        method is also called.

        Raises:
            ValueError: a module has parameters but no method ``reset_parameters``.
        """
        std = self.config.initializer_range
        # First initialize linear layers, embeddings and layers with `draw`. The values for a seed depend on this order.
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

        # Then initialize all other modules, submodules first, so that a module may change values of its submodules.
        for name, module in reversed([*self.named_modules()]):
            if module in drawn and not _resets_itself(module):
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
        """Context manager within which parameters, even tied ones, may be replaced one by one.

        At the end, parameters that were tied at the beginning are tied again.
        """
        first_names: dict[int, str] = {}  # maps the identity of a parameter to its first name
        aliases = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first = first_names.setdefault(id(parameter), name)
            if first != name:
                aliases[name] = first
        yield
        for name, first in aliases.items():
            # The parameter under the first name may be new, so it is set under the other names as well.
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, self.get_parameter(first))

    def _apply(self, fn: Any, recurse: bool = True) -> "Self":
        with self._sharing():  # moving from the meta device creates one new parameter per name
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> "Self":
        """Like `torch.nn.Module.to_empty`, but without importing SymPy for tensors on the meta device."""
        return self._apply(functools.partial(empty_on, device), recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Like `torch.nn.Module.load_state_dict`, except that tied parameters stay tied even with ``assign``."""
        with self._sharing() if assign else nullcontext():
            return super().load_state_dict(state_dict, strict, assign)

    def current_assets(self) -> dict[str, bytes]:
        """Return the current content of the files that are saved with a checkpoint."""
        return self.assets

    def current_kept_tensors(self) -> dict[str, Tensor]:
        """Return the current values of the tensors that are saved in addition to the parameters."""
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
        """All blocks in execution order: first the blocks of the vision tower, if any, then the decoder's blocks."""
        return [*([] if self.visual is None else self.visual.blocks), *self.layers]

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of all parameters or of all trainable parameters, with or without the embedding.

        Tied parameters count once.
        """
        excluded = self.embed_tokens.weight if exclude_embeddings else None
        # The keys are parameters, so that a tied parameter counts once.
        sizes = {weight: size for module in self.modules() for weight, size in own_parameters(module).items()}
        return sum(
            size
            for weight, size in sizes.items()
            if weight is not excluded and (weight.requires_grad or not only_trainable)
        )

    def hidden_matrices(self) -> dict[str, nn.Parameter]:
        """Return the weights of all linear layers and routers except the head, and the stacked weights of experts, in a
        dict from names to parameters."""
        linear = {f"{path}.weight" for path, module in self.named_modules() if isinstance(module, nn.Linear)}
        # The matrices of all experts are one parameter [X, O, C], which is not in an `nn.Linear`. Neither is the matrix
        # [X, C] of some routers.
        routed = tuple(path for path, layer in named_layers(self) if layer.router is not None)
        routers = {id(weight) for layer in self.routers if layer.router for weight in layer.router.parameters()}
        return {
            name: weight
            for name, weight in self.named_parameters()
            if (name in linear and weight is not self.lm_head.weight)
            or (name.rpartition(".")[0] in routed and weight.dim() == 3)
            or (id(weight) in routers and weight.dim() == 2)
        }

    def print_trainable_parameters(self) -> None:
        """Print the number of trainable parameters and the total number of parameters."""
        trainable, total = self.num_parameters(only_trainable=True), self.num_parameters()
        print(f"{trainable:,} of {total:,} parameters are trainable ({trainable / total:.3%})")

    def set_attention_dropout(self, probability: float) -> None:
        """Set the probability with which the attention of every block drops an attention weight in training.

        The config does not change, so a saved model has the old ``attention_dropout``.

        Raises:
            ValueError: ``probability`` is not in [0, 1).
        """
        if not 0 <= probability < 1:
            raise ValueError(f"set_attention_dropout: probability must be in [0, 1), got {probability}.")
        for layer in layers_of(self.layers):
            layer.set_attention_dropout(probability)

    def set_bidirectional(self, bidirectional: bool = True) -> None:
        """Let each token attend to all tokens of its document, including later ones, as in an encoder.

        The model then computes hidden states only; it can't generate.

        Raises:
            ValueError: the model takes images; an attention layer has a window, chunks or sinks; or a layer that is not
                attention reads tokens in order.
        """
        if bidirectional and self.visual is not None:
            raise ValueError(
                f"set_bidirectional: the model must be one of text, got {type(self).__name__}, which takes images. Its "
                "is_causal in config.json, at the top level and in text_config, must be true."
            )
        for path, layer in named_layers(self.layers) if bidirectional else ():
            spec = layer.attention
            must_be_causal = layer.recurrent or layer.needs_bounds
            if spec is not None:
                is_limited = spec.window is not None or spec.chunk is not None
                must_be_causal = must_be_causal or is_limited or spec.needs_flash  # attention with sinks
            if must_be_causal:
                raise ValueError(
                    "set_bidirectional: all layers must be attention without window, chunks and sinks, got "
                    f"{type(layer).__name__} in layers.{path}. Leave the model causal."
                )
        self.bidirectional = bidirectional

    def set_checkpointing(self, policy: str | list[str], *, offload_layers: int = 0) -> None:
        """Choose which activations are saved for the backward, and where. Gradients do not depend on this choice.

        Args:
            policy: one policy for all blocks, or a list with a policy for each block. "none" saves all tensors that the
                fused ops need. "selective" recomputes the gate and up projections of the MLP, whose outputs are the
                largest activations. "full" saves only the block's input and recomputes everything else, except the last
                projection, whose output the backward does not need. Under "full", blocks with routed experts also save
                the choice of the experts, so that the backward routes tokens to the same experts. Compiled blocks and
                models, blocks with experts of which a part is compiled or has a replaced forward, blocks with experts
                on several ranks, and blocks whose later layers need the output of the experts also save the input of
                the MLP.
            offload_layers: number of blocks whose activations are offloaded to host memory, by copies that overlap
                with the compute stream. These blocks are spread evenly over the model and exclude the last two
                blocks if possible, so that copies can finish while other blocks run. Offloading works with compiled
                blocks. A model with offloading is not compiled as one graph: ``torch.compile(model)`` splits it into
                several graphs, and with ``fullgraph=True``, the forward fails.

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
        # Check everything before anything is changed.
        for block_policy in policies:
            check_policy("policy", block_policy)

        self.checkpointing = policy
        # A block whose second forward may have different results is not recomputed as a whole. Its layers recompute
        # their own activations instead.
        self.recomputed = frozenset(
            index
            for index, (block, block_policy) in enumerate(zip(self.layers, policies, strict=True))
            if block_policy == "full" and is_replayable(block)
        )
        self.offloaded = offloaded_blocks(blocks, offload_layers)
        for block, block_policy in zip(self.layers, policies, strict=True):
            set_policy(block, block_policy)

    def set_gate_up_8bit(self, enabled: bool = True) -> None:
        """Choose whether the gated MLPs of the blocks save gate and up in 8 bits for the backward.

        Gate and up are the largest activations of a block. In 8 bits, they take about half of the memory, and nothing
        is recomputed. The loss does not change. The gradients do: the backward computes the activation and its
        derivative from rounded numbers, which differ from the exact ones by at most 0.4% of the largest of 32
        neighbors. The choice applies to blocks with the checkpointing policy "none", and on accelerators. Routed
        experts save gate and up in full. So does an MLP that does not run as one op, for example because it has hooks
        or multipliers, or because its adapters have dropout or are DoRA's.

        Raises:
            ValueError: no block has a gated MLP that can run as one op.
        """
        found = [layer.set_gate_up_8bit(enabled) for layer in layers_of(self.layers)]
        if not any(found):
            raise ValueError(
                f"set_gate_up_8bit: the model must have gated MLPs that run as one op, got {type(self).__name__} "
                'without any. Recompute the MLPs instead, with set_checkpointing("selective").'
            )

    @foreign_arguments("forward")
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
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
        """Compute the logits, or, if ``labels`` are given, the loss without materializing the logits.

        Args:
            input_ids: [B, T] int64.
            labels: [B, T] int64, unshifted; labels of −100 are ignored. Padding, the last token of a row and the
                last token of a packed document have no target.
            position_ids, attention_mask, cu_seqlens, parents: see `BatchLayout.build`.
            inputs_embeds: [B, T, C], embeddings that replace ``input_ids``.
            num_items_in_batch: number by which the summed loss is divided, by default the number of targets in this
                batch. With gradient accumulation or several ranks, pass the number of targets in all accumulation steps
                and on all ranks, as a number or a tensor of one element. The number may be 0 only if this batch has no
                targets. The auxiliary loss is multiplied by the fraction of these targets that is in this batch. Over
                all batches of a step, these fractions add up to 1.
            return_logits: whether to return logits. By default, logits are returned only if there are no ``labels``.
                True returns logits in addition to the loss. If the argument is False and there are no ``labels``,
                the head is skipped, and its input is returned in ``hidden_states``.
            return_log_probs: whether to return the log-probabilities of the targets instead of the loss, for custom
                losses. The targets are ``labels`` shifted by `BatchLayout.shift`.
            loss_function: function that computes the loss from ``(hidden, weight, target)``: the normalized output of
                the last block [B, T, C], the head's weight [V, C] and the shifted labels [B, T]. It may return any
                object. The function is called inside the head's forward, where FSDP has gathered the weight. The
                function must itself apply the model's softcap and logit scale. ``aux_loss`` is not added to its result.
            logits_to_keep: number of tokens at the end of each row whose logits are returned; 0 returns all logits. It
                can't be combined with ``labels``.
            output_hidden_states: whether to return the hidden states before each block and after the last norm.
            routed_experts: [B, T, L, K] integers, the K experts of each token in each of the L layers with routed
                experts, as `rollout` records them. These experts replace the routers' choice (routing replay), but the
                router logits still determine the experts' weights, the gradients of the routers and the auxiliary loss.
                For a token with negative entries, the routers choose.
            cache: decode cache, to which the tokens are appended.
            cu_seq_lens_q, cu_seq_lens_k: two other names of ``cu_seqlens``, as passed by the
                ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` of transformers.
            max_length_q, max_length_k: ignored; accepted because the same collator passes them.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: arguments exclude each other, or shapes or values are wrong; see `BatchLayout.build`.
        """
        cu_seqlens = take_cu_seqlens(cu_seqlens, {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k})
        embeds, layout = self.prepare(
            input_ids, position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens,
            parents=parents, inputs_embeds=inputs_embeds, cache=cache,
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
        parents: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DecodeCache | None = None,
    ) -> tuple[Tensor, BatchLayout]:
        """Return the arguments of `run`: the embeddings of this rank's tokens, and the layout of the batch.

        Args: as in `forward`.
        """
        embeds, shape = self.embed(input_ids, inputs_embeds)
        layout = self.layout(
            shape, embeds, position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens,
            parents=parents, cache=cache, **self.layout_inputs(input_ids, embeds, shape[1]),
        )  # fmt: skip
        return embeds, layout

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[Tensor, tuple[int, int]]:
        """Return the embeddings of this rank's tokens, and the shape (B, T) of the whole batch."""
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
        return self.embed_tokens(self.groups.local_along_context(input_ids)), (B, T)

    def layout_inputs(self, input_ids: Tensor | None, embeds: Tensor, T: int) -> dict[str, Any]:
        """Return the additional fields of ``layout_class`` for rows of T tokens.

        ``embeds`` has only the embeddings of this rank's tokens.
        """
        return {}

    def layout(self, shape: tuple[int, int], embeds: Tensor, **options: Any) -> BatchLayout:
        """Build the layout of a batch of ``shape`` (B, T); the options are as in `BatchLayout.build`."""
        if self._windows is None:
            raise ValueError(
                f"{type(self).__name__}: the constructor must end with self.post_init(), got no call of it. Add it."
            )
        rotary: dict[str, Any] = dict(self.rotary.items())
        windows = self._windows
        # Attention with sinks has a fused kernel only in half precision, and only if no document continues another.
        # In all other cases, its layers need a mask.
        fused = takes_segments(embeds.device, embeds.dtype) and options.get("parents") is None
        if embeds.device.type in ACCELERATORS and not fused:
            windows = {window: needed or window in self._needs_flash for window, needed in windows.items()}
        if options.get("parents") is not None and not self.takes_parents:
            raise ValueError(
                "forward: parents needs a model with causal attention, without chunks, with rotary embeddings that do "
                f"not depend on lengths, and with images that allow it, got {type(self).__name__}. Give each document "
                "the tokens of its parent instead."
            )
        if self.bidirectional:
            if options.get("cache") is not None:
                raise ValueError(
                    "forward: a bidirectional model has no decode cache and can't generate, got a cache. Call "
                    "set_bidirectional(False)."
                )
            options["causal"] = False
        return self.layout_class.build(
            shape, embeds.device, rotary, windows=windows, needs_bounds=self.needs_bounds, dtype=embeds.dtype,
            chunks=self._chunks, **options,
        )  # fmt: skip

    @property
    def takes_parents(self) -> bool:
        """Whether a packed document may continue another one; see ``parents`` of `BatchLayout.build`.

        Recurrent layers, attention in chunks, rotary embeddings that depend on the length of a document, and some
        models with images (see `images_take_parents`) do not support this.
        """
        reads_order = any(layer.recurrent or layer.needs_bounds for layer in layers_of(self.layers))
        reads_lengths = any(getattr(table, "needs_lengths", False) for table in self.rotary.values())
        has_images = self.visual is not None and not self.images_take_parents
        return not (self._chunks or self.bidirectional or has_images or reads_order or reads_lengths)

    @property
    def images_take_parents(self) -> bool:
        """Whether a packed document of a model with images may continue another one, which may have images."""
        return False

    def stand_ins(self, layout: BatchLayout, like: Tensor) -> BatchLayout:
        """Return a layout for running one block alone. Placeholders in this layout replace the tensors that other
        blocks would add.

        Args:
            layout: a result of `layout`.
            like: [B, T, C], the residual stream. The placeholders have its dtype.
        """
        return layout

    @property
    def held_elements(self) -> int:
        """Number of elements per token that parts of the model outside of the blocks save for the backward."""
        return 0

    def carry(self, index: int, more: list[Tensor], layout: BatchLayout) -> tuple[list[Tensor], BatchLayout]:
        """Return the router logits of a block, and the layout for the blocks after it.

        Args:
            index: index of the block.
            more: what the block returns in addition to ``x`` and the residual stream.
            layout: the layout that was passed to the block.
        """
        return more, layout

    def run(self, embeds: Tensor, layout: BatchLayout, **options: Any) -> CausalLMOutput:
        """Run blocks, norm, head and loss.

        Args:
            embeds: [B, T, C] for all tokens, or only for this rank's tokens.
            layout: layout of the whole batch.
            options: arguments of `forward` that are fields of `HeadRequest`.
        """
        request = HeadRequest.of(options)
        compile_ahead(self, embeds, layout, options)
        cache, groups, T = layout.cache, self.groups, layout.position_ids.shape[-1]
        request.check(embeds.shape[0], T, cached=cache is not None)
        groups.check_tokens(T, whole=cache is not None or request.needs_all_tokens)

        # Select this rank's share of the given experts, of the tokens and of the targets.
        if request.routed_experts is not None:
            experts = self._share_experts(request.routed_experts.to(embeds.device), embeds.shape[0], T)
            layout = replace(layout, experts=experts)
        if embeds.shape[1] == T:
            embeds = groups.local_tokens(embeds)  # [B, T / R, C]
        targets = None if request.labels is None else LossTargets.of(request, layout, groups, embeds)

        # Run the blocks and the norm.
        states: list[Tensor] = []
        collect = [states] if request.output_hidden_states else []  # overrides of `run_blocks` may lack ``states``
        hidden, router_logits = self.run_blocks(embeds, layout, *collect)
        hidden = groups.enter_head(hidden)  # [B, T, C], under context parallelism [B, T / R, C]
        # Results are collected in a dictionary, because torch 2.11 cannot compile `_replace` of a named tuple.
        output: dict[str, Any] = {"router_logits": tuple(router_logits)}
        if request.output_hidden_states or request.without_head:
            output["hidden_states"] = (*states, hidden)

        # Run the head, which also computes the loss.
        loss: Any = None
        logits: Any = None
        if not request.without_head:
            loss, logits = self._apply_head(hidden, request, targets)
        if cache is not None:  # after the head, so that an error in the head leaves the cache unchanged
            cache.advance(T)
        if request.without_head:
            return CausalLMOutput(**output)
        aux_loss = None if cache is not None else self._weighted_auxiliary_loss(router_logits, layout, request, targets)
        output |= {"logits": groups.gather_logits(logits), "aux_loss": aux_loss}
        if request.return_log_probs:
            return CausalLMOutput(**output, log_probs=groups.gather_log_probs(loss))
        if loss is not None and request.loss_function is None:
            loss = groups.sum_loss(loss)
            loss = loss if aux_loss is None else loss + aux_loss
        return CausalLMOutput(**output, loss=loss)

    def _apply_head(self, hidden: Tensor, request: HeadRequest, targets: LossTargets | None) -> tuple[Any, Any]:
        """Return the loss (or the log-probabilities of the targets) and the logits, both for this rank's tokens."""
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
        if request.return_log_probs and targets.rows is not None:
            loss = targets.rows.spread(loss)  # [B, T / R]
        return loss, logits

    def _weighted_auxiliary_loss(
        self, router_logits: list[Tensor], layout: BatchLayout, request: HeadRequest, targets: LossTargets | None
    ) -> Tensor | None:
        """Return `auxiliary_loss`, multiplied by this batch's share of the targets in the optimizer step."""
        mask = None if layout.attention_mask is None else self.groups.local_along_context(layout.attention_mask)
        aux_loss = self.auxiliary_loss(router_logits, mask)
        if aux_loss is None or targets is None or request.num_items_in_batch is None:
            return aux_loss
        return self.groups.share_of_step(targets.shifted, request.num_items_in_batch) * aux_loss

    @property
    def routers(self) -> list[Layer]:
        """The layers with routed experts, in the order of ``router_logits``."""
        return routed_layers(self.layers)

    def choose_experts(self, router_logits: Sequence[Tensor]) -> Tensor:
        """Return the experts [B · T, L, K] int16 that the routers choose, given the router logits of a forward."""
        chosen = [layer.choose(logits) for layer, logits in zip(self.routers, router_logits, strict=True)]
        return torch.stack(chosen, 1).to(torch.int16)

    def _share_experts(self, experts: Tensor, B: int, T: int) -> tuple[Tensor, ...]:
        """On one of R ranks, return this rank's part of ``routed_experts``: a tensor [B, T / R, K] for each layer that
        has routed experts."""
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
        share = self.groups.local_tokens(experts.flatten(2))  # [B, T / R, L · K]
        by_layer: tuple[Tensor, ...] = share.unflatten(2, shape[2:]).unbind(2)
        return by_layer

    def _by_block(self, experts: Sequence[Tensor]) -> dict[int, tuple[Tensor, ...]]:
        """Map the index of each block to the block's tensors in ``experts``, which has one tensor for each layer that
        has routed experts."""
        remaining = iter(experts)
        routers = map(routed_layers, self.layers)
        return {index: tuple(next(remaining) for _ in layers) for index, layers in enumerate(routers) if layers}

    def run_blocks(
        self, embeds: Tensor, layout: BatchLayout, states: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the normalized output of the last block, [B, T, C], and the router logits of all blocks.

        If ``states`` is given, the residual stream before each block, [B, T, C], is appended to it.
        """
        offload = Offload() if self.offloaded and torch.is_grad_enabled() else None
        # The compiler ends its graph at this error, and runs the method uncompiled. Users see the error only if they
        # require a single graph.
        if offload is not None and torch.compiler.is_compiling():
            raise ValueError(
                "forward: offload_layers must be 0 in a model compiled as one graph. Compile the blocks instead."
            )
        # With a decode cache, no block is recomputed, because it would append to the cache again.
        runs_once = not torch.is_grad_enabled() or layout.cache is not None or in_graph(embeds)
        recomputed: frozenset[int] = frozenset() if runs_once else self.recomputed
        # Each block is given only the experts of its own layers.
        experts: dict[int, tuple[Tensor, ...]] = {}
        if layout.experts:
            experts, layout = self._by_block(layout.experts), replace(layout, experts=())

        # x [B, T, C] is not yet added to the residual stream; the kernel of the next norm adds it.
        x: Tensor | None = None
        residual = embeds
        router_logits: list[Tensor] = []
        for index, block in enumerate(self.layers):
            if states is not None:
                # The input of a block is the residual stream including the branch that is still to be added.
                states.append(residual if x is None else residual + x)
            run: Any = block
            if index in recomputed and can_run_again(block):
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
        """Return the residual stream [B, T, C] after a block.

        Model families that add terms between blocks override this method.
        """
        return residual

    def prompt_positions(self, prompts: Tensor, mask: Tensor | None, new: int, inputs: dict[str, Any]) -> Tensor:
        """Return the positions of prompts and of the tokens that are generated after them.

        Args:
            prompts: [B, T] int64.
            mask: [B, T], 0 for padding, which must be on the left and is not counted; None for no padding.
            new: number of tokens to generate.
            inputs: other arguments of `forward` that belong to the prompts; see `prompt_inputs`.

        Returns:
            [1 or B, T + new] int64, or [3, 1 or B, T + new] in time, height and width.
        """
        T = prompts.shape[1] + new
        if mask is None:
            return torch.arange(T, device=prompts.device)[None]
        return (nn.functional.pad(mask, (0, new), value=1).cumsum(1) - 1).clamp_min(0)

    def complete_inputs(self, prompts: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `forward` that belong to prompts [B, T], with defaults for missing arguments."""
        return inputs

    def auxiliary_loss(self, router_logits: list[Tensor], attention_mask: Tensor | None) -> Tensor | None:
        """Return the weighted auxiliary loss that is added to the cross entropy, or None if there is none.

        The auxiliary loss is the load-balancing loss over all layers with routed experts, if the config enables it.
        """
        if not (router_logits and getattr(self.config, "output_router_logits", False)):
            return None
        weighted: Tensor = self.config.router_aux_loss_coef * self.balancing_loss(router_logits, attention_mask)
        return weighted

    def balancing_loss(self, router_logits: Sequence[Tensor], attention_mask: Tensor | None) -> Tensor:
        """Return the unweighted load-balancing loss over all layers with routed experts."""
        return load_balancing_loss(router_logits, self.config.num_experts_per_tok, attention_mask, self.groups.balance)


def _resets_itself(module: nn.Module) -> bool:
    """Whether the module's class derives from a linear layer, an embedding or a `Layer`, and adds its own
    ``reset_parameters``."""
    if isinstance(module, nn.Linear | nn.Embedding):
        bases = (nn.Linear, nn.Embedding, LigerEmbedding)
        return type(module).reset_parameters not in [base.reset_parameters for base in bases]
    # If the class that defines `draw` also has ``reset_parameters``, its `draw` calls it.
    drawer = next(cls for cls in type(module).__mro__ if "draw" in vars(cls))
    return hasattr(module, "reset_parameters") and not hasattr(drawer, "reset_parameters")
