"""The shell that every text model shares: embedding -> blocks -> norm -> head or loss; loading, saving, generating."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from liger_models.kernels.collectives import Ranks, all_tokens, divide_gradient, enter, own_tokens, sum_over
from liger_models.kernels.dispatch import check
from liger_models.kernels.moe import load_balancing_loss
from liger_models.kernels.options import KernelOptions

from .attention import LigerAttention
from .cross_attention import ImageStates, LigerCrossAttention
from .embedding import LigerEmbedding
from .head import LigerLMHead, LossFunction, Targets
from .mlp import GatedMLP, LigerMLP
from .moe import LigerMoE
from .norm import LigerLayerNorm, LigerRMSNorm
from .offload import Offload
from .recompute import is_compiled, run_again
from .sequence import DecodeCache, Sequence

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from liger_models.generation import Options, Prompts
    from liger_models.tokenizer import Tokenizer

CHECKPOINTING_POLICIES = ("none", "selective", "full")


class CausalLMOutput(NamedTuple):
    """Result of `CausalLM.forward`; what was not computed is None.

    Attributes:
        loss: [] fp32; or what ``loss_function`` has returned.
        logits: [B, T, V] in the dtype of the weights.
        aux_loss: [] what mixture-of-experts layers add to ``loss``; None with a decode cache.
        log_probs: [B, T] fp32, of the token that follows each, 0 where that is not a target.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None
    log_probs: Tensor | None = None


class CausalLMConfig(Protocol):
    """What the shell reads of a configuration."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


def _gather(x: Tensor, ranks: Ranks) -> Tensor:
    """[B, T / R, C] of each rank's tokens -> [B, T, C], so that the average of the ranks' gradients is that of it."""
    return all_tokens(divide_gradient(x, 1 / ranks.size), ranks)


def _in_graph(x: Tensor) -> bool:
    """Whether calls are recorded, or tensors have no values, so that nothing may depend on those of this batch."""
    without_values = x.is_meta or hasattr(x, "fake_mode")
    return torch.compiler.is_compiling() or without_values or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_policy(name: str, policy: str) -> None:
    """Raise ValueError unless ``policy`` is one of `CHECKPOINTING_POLICIES`."""
    known = policy in CHECKPOINTING_POLICIES
    check(known, f"set_checkpointing: {name} must be one of {CHECKPOINTING_POLICIES}, got {policy!r}.")


def keeps_input_alone(block: nn.Module, policy: str) -> bool:
    """Whether a block is made again as a whole; with routed experts the backward could choose others."""
    return policy == "full" and not any(isinstance(module, LigerMoE) for module in block.modules())


def set_recompute(block: nn.Module, policy: str) -> None:
    """Set what a block makes again in the backward, by one of `CHECKPOINTING_POLICIES`."""
    for module in block.modules():
        if isinstance(module, GatedMLP | LigerMLP | LigerMoE):
            module.recompute = policy in ("selective", "full")
        elif isinstance(module, LigerAttention | LigerCrossAttention):
            module.recompute = policy == "full"


class CausalLM(nn.Module):
    """A decoder with a language-model head. Architectures subclass it, set the parts below, and call `post_init`.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class: ClassVar[type[Any]]
    prompt_inputs: ClassVar[tuple[str, ...]] = ()
    """Names of what `forward` takes besides the tokens, for prompts: pixels."""
    embed_tokens: LigerEmbedding
    layers: nn.ModuleList
    """Blocks: ``(x | None, residual, sequence) -> (x, residual)``, x what is still to be added to the stream. One with
    routed experts returns its router logits as a third."""
    norm: LigerRMSNorm
    lm_head: LigerLMHead
    rotary: nn.ModuleDict
    """`RotaryEmbedding` by name; an attention layer names the one that it takes."""

    accepts_loss_kwargs: ClassVar[bool] = True
    """For transformers' Trainer: hand ``num_items_in_batch`` to the forward."""
    loss_type: ClassVar[str] = "ForCausalLM"
    """For transformers' Trainer: a row's first label is no target."""
    _keys_to_ignore_on_save: ClassVar[tuple[str, ...]] = ("lm_head.weight",)
    """For transformers' Trainer: tie the weights again if this is what a checkpoint lacks."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if is_dataclass(cls.__dict__.get("config_class")):
            config_class: Any = cls.config_class
            frozen = config_class.__setattr__

            def set_attribute(config: Any, name: str, value: Any) -> None:
                if name != "use_cache":  # transformers' Trainer sets it on every model; nothing here reads it
                    frozen(config, name, value)

            config_class.__setattr__ = set_attribute

    def __init__(self, config: CausalLMConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__()
        self.config: Any = config
        self.kernels = kernels or KernelOptions()
        self.checkpointing: str | list[str] = "none"
        self.recomputed: frozenset[int] = frozenset()
        """Blocks that are made again as a whole."""
        self.offloaded: frozenset[int] = frozenset()
        """Blocks whose activations go to host memory."""
        self.ranks: Ranks | None = None
        """Those over which the layers are cut, see `liger_models.parallel.apply_tp`."""
        self.context_ranks: Ranks | None = None
        """Those that have a part of the tokens each, see `liger_models.parallel.apply_cp`."""
        self.balance_ranks: Ranks | None = None
        """Those over whose tokens together experts are balanced, see `liger_models.parallel.apply_ep`."""
        self._windows: dict[int | None, bool] | None = None
        """Windows of the attention layers -> whether one of them has a softcap, by `post_init`."""
        self.hf_config: dict[str, Any] = {}
        """The config.json that the model was loaded with; keys that the model does not read are saved again."""
        self.assets: dict[str, bytes] = {}
        """Files that travel with the checkpoint untouched: generation_config.json, the tokenizer's."""

    def post_init(self) -> None:
        """Check the parts, tie and initialise the weights; the last line of a subclass's constructor.

        Raises:
            ValueError: a part is missing, or attention layers that share a place in the decode cache.
        """
        name = type(self).__name__
        absent = [part for part in ("embed_tokens", "layers", "norm", "lm_head", "rotary") if not hasattr(self, part)]
        check(not absent, f"{name}: must have {', '.join(absent)} when it calls post_init, got none. Set them before.")
        self.check_buffers()
        self._windows = {}
        places: dict[int, str] = {}
        for path, module in self.layers.named_modules(remove_duplicate=False):
            if isinstance(module, LigerAttention):
                other = places.setdefault(module.layer, path)
                check(
                    other == path,
                    f"{name}: each attention layer must have a place of its own in the decode cache, got "
                    f"layer={module.layer} for layers.{other} and layers.{path}. Number them.",
                )
                check(
                    module.rotary is None or module.rotary in self.rotary,
                    f"{name}: rotary must have the embedding {module.rotary!r} that layers.{path} takes, got "
                    f"{', '.join(self.rotary)}.",
                )
                needed = self._windows.get(module.window, False)
                self._windows[module.window] = needed or module.softcap is not None
        self.tie_weights()
        if self.device.type != "meta":
            self.reset_parameters()

    def check_buffers(self) -> None:
        """Raise ValueError if there is a buffer; a derived class can have made one behind `post_init`."""
        buffers = [buffer for buffer, _ in self.named_buffers()]
        check(
            not buffers,
            f"{type(self).__name__}: must have no buffers, which checkpoints and meta devices lose, got "
            f"{', '.join(buffers[:5])}. Make them parameters, or compute them from the config as "
            "layers.rope.RotaryEmbedding does.",
        )

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's, if the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def reset_parameters(self) -> None:
        """Draw all weights anew: normal with ``initializer_range``, biases 0, norms as `LigerRMSNorm` says.

        Modules of other kinds then draw their own, inner ones first, by a method of this name.

        Raises:
            ValueError: parameters of a module that has none.
        """
        known = nn.Linear, nn.Embedding, LigerRMSNorm, LigerLayerNorm, LigerMoE
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
            elif isinstance(module, LigerRMSNorm | LigerLayerNorm):
                module.reset_parameters()
            elif isinstance(module, LigerMoE):
                module.reset_parameters(self.config.initializer_range)
        for name, module in reversed([*self.named_modules()]):
            if isinstance(module, known):
                continue
            own = [parameter for parameter, _ in module.named_parameters(name, recurse=False)]
            reset = getattr(type(module), "reset_parameters", None)
            check(
                not own or reset not in (None, CausalLM.reset_parameters),
                f"{type(self).__name__}: {type(module).__name__} must have a method reset_parameters that draws "
                f"{', '.join(own)}, got none. Fresh weights are made without memory first, and then drawn.",
            )
            if reset is not None and module is not self:
                reset(module)

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """Names that are one parameter are one again behind what makes a new parameter of each name."""
        first: dict[int, str] = {}
        named = [(name, id(each)) for name, each in self.named_parameters(remove_duplicate=False)]
        again = {name: first[each] for name, each in named if first.setdefault(each, name) != name}
        yield
        for name, same in again.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, self.get_parameter(same))
        self.tie_weights()

    def _apply(self, fn: Any, recurse: bool = True) -> "Self":
        with self._sharing():  # moving from the meta device makes a new parameter of each name
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of `torch.nn.Module`; with ``assign``, too, shared parameters stay shared."""
        with self._sharing() if assign else nullcontext():
            return super().load_state_dict(state_dict, strict, assign)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding's weight."""
        return self.embed_tokens.weight.dtype

    def num_parameters(self, exclude_embeddings: bool = False) -> int:
        """Number of parameters, with or without the embedding's; tied ones count once."""
        excluded = self.embed_tokens.weight if exclude_embeddings else None
        return sum(parameter.numel() for parameter in self.parameters() if parameter is not excluded)

    def get_input_embeddings(self) -> LigerEmbedding:
        """The embedding, by the name under which transformers' Trainer asks for it (NEFTune)."""
        return self.embed_tokens

    def resize_token_embeddings(self, new_num_tokens: int, pad_to_multiple_of: int | None = None) -> LigerEmbedding:
        """Give embedding and head another number of rows, for tokens that were added; the config's ``vocab_size`` too.

        The first rows stay as they are. New ones are the mean of the old ones, so that new tokens take little
        probability from others (https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Weights become new
        parameters: make optimizers, adapters and Medusa heads, cut and shard afterwards.

        Args:
            new_num_tokens: V; at least the ids that will be used.
            pad_to_multiple_of: raise V to the next multiple.

        Returns:
            The embedding.

        Raises:
            ValueError: numbers below 1; a model that is cut or sharded, has adapters on these two parts, or whose
                embedding has rows that the head has not (Llama 3.2 Vision's placeholders).
        """
        for name, given in (("new_num_tokens", new_num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
            check(given is None or given > 0, f"resize_token_embeddings: {name} must be positive, got {given}.")
        V = -(-new_num_tokens // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
        parts: tuple[nn.Module, ...] = self.embed_tokens, self.lm_head
        plain = all([name for name, _ in part.named_parameters()] == ["weight"] for part in parts)
        cut = self.ranks is not None or any(hasattr(part.weight, "full_tensor") for part in parts)
        check(
            plain and not cut,
            "resize_token_embeddings: embedding and head must be whole and without adapters, got a model that "
            f"{'is cut or sharded' if cut else 'has adapters on them'}. Resize first.",
        )
        rows = [len(part.weight) for part in parts]  # type: ignore[arg-type]
        check(
            rows[0] == rows[1] == self.config.vocab_size,
            f"resize_token_embeddings: embedding and head must have vocab_size ({self.config.vocab_size}) rows, got "
            f"{rows[0]} and {rows[1]}. The ids behind the vocabulary stand for something else.",
        )
        tied = self.lm_head.weight is self.embed_tokens.weight
        for part in parts[: 1 if tied else 2]:
            old: Tensor = part.weight  # type: ignore[assignment]
            with torch.no_grad():
                mean = old.mean(0, dtype=torch.promote_types(old.dtype, torch.float32)).to(old.dtype)
                kept = old[:V]
                weight = torch.cat([kept, mean.expand(V - len(kept), -1)])
            part.weight = nn.Parameter(weight, requires_grad=old.requires_grad)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.embed_tokens.num_embeddings = self.lm_head.out_features = V
        self.config = replace(self.config, vocab_size=V)
        return self.embed_tokens

    def set_checkpointing(self, policy: str | list[str], *, offload_layers: int = 0) -> None:
        """Choose what is kept for the backward, and where. Every choice gives the same gradients.

        Args:
            policy: of all blocks, or of each. "none" keeps what the fused ops need; "selective" makes the MLP's gate
                and up projection again (the largest activations); "full" keeps only the block's input, and makes all
                else again but a last projection whose result nothing keeps. A block with routed experts keeps their
                input, too, so that the backward cannot choose others; compiled blocks and models do so with the MLP's.
            offload_layers: what so many blocks keep is in host memory in the meantime, copied while the GPU computes.
                They are spread evenly and leave out the last two if they can: the blocks between and behind them give
                the copies time. Not within a compiled model (blocks may be compiled).

        Raises:
            ValueError: an unknown policy, or another number of them or of layers than the model has blocks.
        """
        blocks = len(self.layers)
        policies = [policy] * blocks if isinstance(policy, str) else list(policy)
        check(
            len(policies) == blocks,
            f"set_checkpointing: policy must be one, or one for each of the {blocks} blocks, got {len(policies)}.",
        )
        check(
            0 <= offload_layers <= blocks,
            f"set_checkpointing: offload_layers must be 0 to {blocks}, got {offload_layers}.",
        )
        for each in policies:
            check_policy("policy", each)
        self.checkpointing = policy
        pairs = enumerate(zip(self.layers, policies, strict=True))
        self.recomputed = frozenset(index for index, pair in pairs if keeps_input_alone(*pair))
        span = max(blocks - 2, offload_layers)
        self.offloaded = frozenset(i * span // offload_layers for i in range(offload_layers))
        for block, each in zip(self.layers, policies, strict=True):
            set_recompute(block, each)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: object = None, *, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """`set_checkpointing` under the name, and with the arguments, of transformers' Trainer.

        Args:
            activation_checkpointing_kwargs: of ``torch.utils.checkpoint``; not used.
            every_n_layers: policy "full" for the first of so many blocks.
            offload: what all blocks keep is in host memory in the meantime.

        Raises:
            ValueError: ``every_n_layers`` below 1.
        """
        check(
            every_n_layers >= 1,
            f'every_n_layers must be at least 1, got {every_n_layers}. set_checkpointing("none") keeps everything.',
        )
        blocks = len(self.layers)
        policies = ["none" if index % every_n_layers else "full" for index in range(blocks)]
        self.set_checkpointing(policies, offload_layers=blocks if offload else 0)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None, **options: Any) -> None:
        """As `activation_checkpointing_enable`, by its older name."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

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
        cache: DecodeCache | None = None,
        deepstack: list[Tensor] | None = None,
        visible_until: Tensor | None = None,
        images: ImageStates | None = None,
    ) -> CausalLMOutput:
        """Logits, or with ``labels`` the loss without building the logits.

        Args:
            input_ids: [B, T] int64.
            labels: [B, T] int64, unshifted; −100 is ignored. The last token of a row or of a packed document, and
                padding, predict nothing.
            position_ids, attention_mask, cu_seqlens: see `Sequence.build`.
            inputs_embeds: [B, T, C] instead of ``input_ids``.
            num_items_in_batch: divisor of the summed loss (targets over all accumulation steps and ranks). Default:
                the number of targets at hand.
            return_log_probs: with ``labels``, log-probabilities of the targets in place of the loss, for losses of
                one's own; `sequence.shift` has shifted the labels.
            loss_function: with ``labels``, what takes the loss's place: ``(hidden, weight, target)``, the normed output
                of the last block [B, T, C], the head's weight [V, C] and the shifted labels [B, T], to anything. It is
                called inside the head, where FSDP has gathered the weight; ``aux_loss`` is not added to its result.
                A softcap or a scale of the logits is left to it.
            return_logits: True for logits beside the loss. Default: logits only without ``labels``.
            logits_to_keep: logits of only the last so many tokens; 0 for all. Not with ``labels``.
            cache: decode cache; the tokens are appended to it.
            deepstack: [B, T, C] each, added to the stream behind the first blocks, one behind each.
            visible_until, images: see `Sequence.build`.

        Returns:
            `CausalLMOutput`.

        Raises:
            ValueError: arguments that exclude each other, or shapes that do not fit.
        """
        check(
            (input_ids is None) != (inputs_embeds is None),
            "forward: exactly one of input_ids and inputs_embeds must be given.",
        )
        check(
            labels is None or (cache is None and not logits_to_keep),
            "forward: labels can't be combined with cache or logits_to_keep. Leave them out for a loss.",
        )
        check(not return_log_probs or labels is not None, "forward: return_log_probs needs labels. Pass them.")
        check(
            loss_function is None or (labels is not None and not return_log_probs and num_items_in_batch is None),
            "forward: loss_function needs labels, and neither return_log_probs nor num_items_in_batch.",
        )
        if inputs_embeds is None:
            assert input_ids is not None
            check(input_ids.dim() == 2, f"forward: input_ids must be [B, T], got {list(input_ids.shape)}.")
            B, T = input_ids.shape
        else:
            B, T, _ = inputs_embeds.shape
        ranks, context = self.ranks, self.context_ranks
        sharing = context or (ranks if ranks is not None and ranks.sequence else None)
        check(
            sharing is None or T % sharing.size == 0,
            f"forward: T must be a multiple of the {sharing and sharing.size} ranks that share the tokens, got {T}. "
            "Pad the batch; to generate, leave apply_cp and sequence_parallel out.",
        )
        check(
            context is None or (cache is None and logits_to_keep == 0 and loss_function is None),
            "forward: cache, logits_to_keep and loss_function need all tokens on one rank. Leave apply_cp out.",
        )
        own = slice(None) if context is None else context.own(T)
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_tokens(input_ids[:, own])
        elif context is not None:
            inputs_embeds = inputs_embeds[:, own]
        deepstack = [level[:, own] for level in deepstack or []]
        if ranks is not None and ranks.sequence:
            deepstack = [own_tokens(level, ranks) for level in deepstack]
            if inputs_embeds.shape[1] == T:  # given, or of an embedding that is not cut by tokens
                inputs_embeds = own_tokens(inputs_embeds, ranks)
        check(
            labels is None or tuple(labels.shape) == (B, T),
            f"forward: labels must be [{B}, {T}] like input_ids, got {None if labels is None else list(labels.shape)}.",
        )
        check(
            self._windows is not None,
            f"{type(self).__name__}: the constructor must end with self.post_init(), got no call of it. Add the line.",
        )
        sequence = Sequence.build(
            (B, T), inputs_embeds.device, dict(self.rotary.items()), windows=self._windows,
            position_ids=position_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache,
            visible_until=visible_until, images=images, dtype=inputs_embeds.dtype,
        )  # fmt: skip
        target = None if labels is None else sequence.shift(labels)
        if target is not None and context is not None:
            num_items_in_batch = (target != -100).sum() if num_items_in_batch is None else num_items_in_batch
            target = target[:, own]
        alone = not (return_logits or return_log_probs) and loss_function is None and not _in_graph(inputs_embeds)
        targets = Targets(target) if target is not None and alone else None
        hidden, router_logits = self._hidden(inputs_embeds, sequence, deepstack)
        hidden = enter(hidden, ranks)  # the head is cut by words
        if cache is not None:
            cache.length += T
        if targets is not None:
            hidden, target = targets.select(hidden)
        loss, logits = self.lm_head(
            hidden[:, -logits_to_keep:] if logits_to_keep else hidden,
            target,
            num_items=num_items_in_batch,
            return_logits=bool(return_logits),
            log_probs=return_log_probs,
            loss_function=loss_function,
        )
        if context is not None:
            attention_mask = None if attention_mask is None else attention_mask[:, own]
            logits = None if logits is None else _gather(logits, context)
            if return_log_probs:
                loss = _gather(loss[..., None], context)[..., 0]
            elif loss is not None:
                loss = sum_over(loss, context)
        aux_loss = self.auxiliary_loss(router_logits, attention_mask) if cache is None else None
        if return_log_probs:
            return CausalLMOutput(None, logits, aux_loss, loss)
        if loss is not None and aux_loss is not None and loss_function is None:
            loss = loss + aux_loss
        return CausalLMOutput(loss, logits, aux_loss)

    def _hidden(
        self, inputs_embeds: Tensor, sequence: Sequence, deepstack: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The normed output of the last block, [B, T, C], and the router logits of the blocks that have them."""
        x: Tensor | None = None
        residual = inputs_embeds
        router_logits = []
        offload = Offload() if self.offloaded and torch.is_grad_enabled() else None
        check(
            offload is None or not torch.compiler.is_compiling(),
            "forward: offload_layers must be 0 in a compiled model. Compile the blocks, or don't set it.",
        )
        # A block that ran again would append to the decode cache again.
        once = not torch.is_grad_enabled() or sequence.cache is not None or _in_graph(inputs_embeds)
        again: frozenset[int] = frozenset() if once else self.recomputed
        for index, block in enumerate(self.layers):
            run = functools.partial(run_again, block) if index in again and not is_compiled(block) else block
            with offload.saving(index in self.offloaded) if offload else nullcontext():
                x, residual, *routed = run(x, residual, sequence)
            router_logits += routed
            if index < len(deepstack):
                residual = residual + deepstack[index]
        if offload:
            offload.settle()
        hidden, _ = self.norm.add(x, residual)
        return hidden, router_logits

    def auxiliary_loss(self, router_logits: list[Tensor], attention_mask: Tensor | None) -> Tensor | None:
        """What is added to the loss besides the cross entropy, already weighted; None for nothing.

        Here the load-balancing loss of all layers with routed experts together, if the configuration asks for it.
        """
        if not (router_logits and getattr(self.config, "output_router_logits", False)):
            return None
        loss = load_balancing_loss(router_logits, self.config.num_experts_per_tok, attention_mask, self.balance_ranks)
        weighted: Tensor = self.config.router_aux_loss_coef * loss
        return weighted

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer whose files came with the checkpoint. What is changed in it is saved with the model.

        Raises:
            ValueError: the checkpoint had none.
        """
        from liger_models.tokenizer import Tokenizer

        if "_tokenizer" not in self.__dict__:
            self.__dict__["_tokenizer"] = Tokenizer.from_files(self.assets)
        tokenizer: Tokenizer = self.__dict__["_tokenizer"]
        return tokenizer

    def prompt_positions(self, prompts: Tensor, mask: Tensor | None, new: int, inputs: dict[str, Any]) -> Tensor:
        """Positions of prompts and of what will follow them, for generation.

        Args:
            prompts: [B, T] int64.
            mask: [B, T], 0 for padding on the left, which is not counted; None for none.
            new: number of tokens that will follow.
            inputs: what else the model takes besides the tokens, by the name that `forward` has for it.

        Returns:
            [1 or B, T + new] int64, or with an axis of 3 in front.
        """
        T = prompts.shape[1] + new
        if mask is None:
            return torch.arange(T, device=prompts.device)[None]
        return (nn.functional.pad(mask, (0, new), value=1).cumsum(1) - 1).clamp_min(0)

    def generate(self, input_ids: "Prompts", *, max_new_tokens: int, **options: "Unpack[Options]") -> Tensor:
        """Continue the prompts; see `liger_models.generation.generate`."""
        from liger_models.generation import generate

        return generate(self, input_ids, max_new_tokens=max_new_tokens, **options)

    def stream(self, input_ids: "Prompts", *, max_new_tokens: int, **options: "Unpack[Options]") -> Iterator[Tensor]:
        """Continue the prompts, yielding the tokens of each step; see `liger_models.generation.stream`."""
        from liger_models.generation import stream

        return stream(self, input_ids, max_new_tokens=max_new_tokens, **options)

    @classmethod
    def from_config(
        cls,
        config: CausalLMConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        kernels: KernelOptions | None = None,
    ) -> "Self":
        """A model with freshly drawn weights, made on ``device`` in ``dtype``; ``torch.manual_seed`` decides them."""
        with torch.device("meta"):
            model = cls(config, kernels).to(dtype)
        model.check_buffers()
        model.to_empty(device=device)
        model.reset_parameters()
        return model

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device = "cpu",
        kernels: KernelOptions | None = None,
        strict: bool = False,
        progress: bool = True,
        shard: Callable[["Self"], object] | None = None,
    ) -> "Self":
        """Load a Hugging Face checkpoint from a local folder; see `liger_models.convert.checkpoint.load_pretrained`."""
        from liger_models.convert.checkpoint import load_pretrained

        return load_pretrained(
            cls, folder, dtype=dtype, device=device, kernels=kernels, strict=strict, progress=progress, shard=shard
        )

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        *,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device = "cpu",
        kernels: KernelOptions | None = None,
        strict: bool = False,
        progress: bool = True,
        cache_dir: str | PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        shard: Callable[["Self"], object] | None = None,
    ) -> "Self":
        """Download a checkpoint from the Hugging Face hub, or take it from its cache, and load it.

        Args:
            repo_id: such as "meta-llama/Llama-3.2-1B".
            revision: branch, tag or commit.
            dtype: dtype of the weights, None or "auto" for the checkpoint's own.
            device: where the weights are put, tensor by tensor.
            kernels: which parts run on fused kernels.
            strict: unknown keys of config.json are an error and not a warning.
            progress: show progress bars.
            cache_dir, token, local_files_only, force_download: as in huggingface_hub.
            shard: distributes the parameters of the model before they are loaded, as `parallel.apply_fsdp`.
        """
        from liger_models.convert.hub import download

        folder = download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
            model_class=cls,
            strict=strict,
            progress=progress,
        )
        return cls.from_pretrained(
            folder, dtype=dtype, device=device, kernels=kernels, strict=strict, progress=progress, shard=shard
        )

    def save_pretrained(
        self, folder: str | PathLike[str], *, dtype: torch.dtype | None = None, max_shard_size: int | str = "5GB"
    ) -> None:
        """Write a Hugging Face checkpoint; see `liger_models.convert.checkpoint.save_pretrained`."""
        from liger_models.convert.checkpoint import save_pretrained

        save_pretrained(self, folder, dtype=dtype, max_shard_size=max_shard_size)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        commit_message: str | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Save the model into a repository of the hub, made if need be; see `liger_models.convert.hub.push`.

        Returns:
            Address of the commit.

        Raises:
            ValueError: a sharded model, of which only one rank has the files.
        """
        from liger_models.convert.hub import push

        check(
            not any(hasattr(parameter, "full_tensor") for parameter in self.parameters()),
            "push_to_hub: the model must not be sharded. Call save_pretrained on all ranks, and upload the folder from "
            "one of them.",
        )

        return push(
            self,
            repo_id,
            private=private,
            commit_message=commit_message,
            token=token,
            revision=revision,
            dtype=dtype,
            max_shard_size=max_shard_size,
        )
