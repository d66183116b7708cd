"""The base class of models: it loads and saves checkpoints, generates text, and works with transformers' Trainer."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from liger_models.base.captured import CapturedStep
from liger_models.common.foreign import foreign_arguments, is_hub_name
from liger_models.convert.files import as_dtype
from liger_models.convert.hub import download, push
from liger_models.convert.load import load_pretrained
from liger_models.convert.save import save_pretrained
from liger_models.distributed.ranks import wait_for_ranks
from liger_models.generation.loop import GenerateOutput, generate, stream
from liger_models.generation.options import Options, shows_options
from liger_models.generation.prompts import Prompts
from liger_models.generation.rollout_rows import Completion
from liger_models.generation.rollouts import rollout
from liger_models.kernels.options import KernelOptions
from liger_models.layers.decoder import CausalLMConfig, Decoder
from liger_models.layers.embedding import LigerEmbedding, resize_rows
from liger_models.layers.lm_head import LigerLMHead
from liger_models.memory.plan import plan_memory
from liger_models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class CausalLM(Decoder):
    """A decoder that can generate text, and that can read and write Hugging Face checkpoints.

    The model class of a family derives from this class, sets the attributes of `Decoder`, and calls `post_init`.

    Args:
        config: the sizes and constants of the model.
        kernels: the parts of the model that run on fused kernels. Default: all parts.
    """

    accepts_loss_kwargs: ClassVar[bool] = True
    """Tells transformers' Trainer to pass ``num_items_in_batch`` to the forward."""
    loss_type: ClassVar[str] = "ForCausalLM"
    """Tells transformers' Trainer that the first label of a row is not a target."""
    _keys_to_ignore_on_save: ClassVar[tuple[str, ...]] = ("lm_head.weight",)
    """Tells transformers' Trainer to tie the weights again if a checkpoint lacks ``lm_head.weight``."""

    @property
    def peft_config(self) -> Any:
        """This property always raises an error: PEFT can adapt only a model with unpacked projections; see
        `unpack_projections`.

        Raises:
            AttributeError: code outside of PEFT reads the property.
            ValueError: PEFT reads the property. PEFT does this before it looks for modules to replace.
        """
        if sys._getframe(1).f_globals.get("__name__", "").startswith("peft.tuners."):
            raise ValueError(CausalLM._must_be_unpacked(self))
        raise AttributeError(f"{type(self).__name__} has no peft_config.")

    @peft_config.setter
    def peft_config(self, _: object) -> None:
        for path, module in [*self.named_modules()]:
            if hasattr(module, "get_base_layer"):
                self.set_submodule(path, module.get_base_layer())
        raise ValueError(CausalLM._must_be_unpacked(self))

    def _must_be_unpacked(self) -> str:
        return (
            f"get_peft_model: {type(self).__name__} must be unpacked, got packed projections, in which PEFT cannot "
            "find q_proj, k_proj, v_proj, gate_proj and up_proj. Pass unpack_projections(model), from "
            "liger_models.adapters, to PEFT or to the trainer that calls it."
        )

    def get_input_embeddings(self) -> LigerEmbedding:
        """Return the token embedding. transformers' Trainer calls this method for NEFTune."""
        return self.embed_tokens

    def resize_token_embeddings(self, new_num_tokens: int, pad_to_multiple_of: int | None = None) -> LigerEmbedding:
        """Resize the embedding, the head and the config's ``vocab_size`` to a new number of tokens.

        Existing rows do not change. Each new row is the mean of the old rows, so that new tokens take little
        probability from the old tokens (https://nlp.stanford.edu/~johnhew/vocab-expansion.html). The resized weights
        are new parameters, so call this method before you create optimizers, adapters or Medusa heads, and before you
        shard the model.

        Args:
            new_num_tokens: V, the new number of rows, which must be above the largest token id in use.
            pad_to_multiple_of: V is rounded up to a multiple of this number.

        Returns:
            The embedding.

        Raises:
            ValueError: a number is below 1 or not an integer; the model is sharded; the embedding or the head has
                adapters; or the embedding has more rows than the head (Llama 3.2 Vision has extra rows for
                placeholders).
        """
        numbers: dict[str, Any] = {"new_num_tokens": new_num_tokens, "pad_to_multiple_of": pad_to_multiple_of}
        for name, number in numbers.items():
            if number is not None and (not isinstance(number, Integral) or int(number) < 1):
                raise ValueError(f"resize_token_embeddings: {name} must be a positive integer, got {number}.")

        # V, rounded up.
        V = -(-new_num_tokens // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)

        # Rows cannot be added to a shard or to an adapter.
        parts: tuple[LigerEmbedding | LigerLMHead, ...] = self.embed_tokens, self.lm_head
        plain = all({name for name, _ in part.named_parameters()} <= {"weight", "bias"} for part in parts)
        cut = self.groups.tensor is not None or any(hasattr(part.weight, "full_tensor") for part in parts)
        if not plain or cut:
            raise ValueError(
                "resize_token_embeddings: embedding and head must not be sharded or have adapters, got a model that "
                f"{'is sharded' if cut else 'has adapters on them'}. Resize first."
            )
        rows = [len(part.weight) for part in parts]
        if not rows[0] == rows[1] == self.config.vocab_size:
            raise ValueError(
                f"resize_token_embeddings: embedding and head must have vocab_size ({self.config.vocab_size}) rows, "
                f"got {rows[0]} and {rows[1]}. Ids beyond the vocabulary are placeholders."
            )

        # A tied head stays tied.
        tied = self.lm_head.weight is self.embed_tokens.weight
        resize_rows(self.embed_tokens, V)
        resize_rows(self.lm_head, V)  # a classification head has no parameters of its own
        if tied and "weight" in self.lm_head._parameters:
            self.lm_head.weight = self.embed_tokens.weight
        self.config = replace(self.config, vocab_size=V)
        return self.embed_tokens

    def set_checkpointing(
        self,
        policy: str | list[str],
        *,
        offload_layers: int = 0,
        budget: int | str | None = None,
        tokens: int | None = None,
    ) -> None:
        """Choose which activations are saved for the backward, and where. The gradients do not depend on this choice.

        Args:
            policy, offload_layers: as for `Decoder.set_checkpointing`. With policy "auto",
                `liger_models.memory.plan_memory` chooses the policy and the number of offloaded layers, such that a
                step with AdamW fits into the budget and is as fast as possible. The plan assumes that AdamW's moments
                are on the device, in the dtype of the weights.
            budget: with "auto", the available device memory, either in bytes or as a text such as "60GB" or "80%".
            tokens: with "auto", the number of tokens in a batch, B · T.

        Raises:
            ValueError: as for `Decoder.set_checkpointing`; no choice fits into the budget; or ``budget`` and ``tokens``
                are given for another policy, or are missing for "auto".
        """
        if policy != "auto":
            if budget is not None or tokens is not None:
                raise ValueError(
                    f'set_checkpointing: budget and tokens are for policy "auto", got {policy!r}. Leave them out.'
                )
            return super().set_checkpointing(policy, offload_layers=offload_layers)
        if budget is None or tokens is None or offload_layers != 0:
            raise ValueError(
                'set_checkpointing: "auto" needs budget and tokens, and chooses offload_layers itself, got '
                f"{budget}, {tokens} and {offload_layers}."
            )

        # The plan keeps the moments on the device and runs the optimizer after the backward, because the model does not
        # own the optimizer.
        plan_memory(self, tokens, budget, host_moments=False, in_backward=False).apply(self)

    def capture(self, batch: Mapping[str, Any]) -> CapturedStep:
        """Capture the forward and backward of a training step in a CUDA graph, for batches shaped like ``batch``.

        ``loss = step(batch)`` does the work of ``loss = model(**batch).loss`` and ``loss.backward()`` in one launch.
        For batches of a few hundred tokens, a step in one launch is several times as fast as a step with separate
        launches. The graph uses the current addresses of the parameters, so move the model, freeze parameters and add
        adapters before the capture. On the CPU the step runs without a graph.

        Args:
            batch: the forward's arguments by name, among them ``labels`` [B, T]. Tensors are copied, and a call may
                pass other tensors of the same shapes and dtypes. All other arguments must keep the values that they
                have in ``batch``.

        Returns:
            A `CapturedStep`. Calling it with a batch returns the loss, [] fp32. The capture itself sets no gradients.

        Raises:
            ValueError: the batch has no labels, a gradient is not None, or a graph could not repeat the step, because
                the model is sharded, has hooks, offloads activations, recomputes whole blocks ("full"), has an
                optimizer in its backward, or is under autocast or ``no_grad``.
            RuntimeError: an operation cannot be captured, such as one that waits for the GPU.
        """
        return CapturedStep(self, batch)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: object = None, *, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Set checkpointing policies; see `set_checkpointing`. transformers' Trainer calls this method.

        Args:
            activation_checkpointing_kwargs: ignored; accepted because Trainer passes it.
            every_n_layers: n. Every n-th block, beginning with the first, gets the policy "full".
            offload: whether to offload the activations of all blocks to host memory.

        Raises:
            ValueError: ``every_n_layers`` is below 1.
        """
        if not every_n_layers >= 1:
            raise ValueError(
                f'every_n_layers must be at least 1, got {every_n_layers}. set_checkpointing("none") saves everything.'
            )
        blocks = len(self.layers)
        policies = ["none" if index % every_n_layers else "full" for index in range(blocks)]
        self.set_checkpointing(policies, offload_layers=blocks if offload else 0)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None, **options: Any) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint. Changes to the tokenizer are saved with the model.

        Raises:
            ValueError: the checkpoint had no tokenizer.
        """
        if "_tokenizer" not in self.__dict__:
            self.__dict__["_tokenizer"] = Tokenizer.from_files(self.assets)
        tokenizer: Tokenizer = self.__dict__["_tokenizer"]
        return tokenizer

    def current_assets(self) -> dict[str, bytes]:
        """Return the files that are saved next to the weights. The tokenizer's files contain its current state."""
        tokenizer: Tokenizer | None = self.__dict__.get("_tokenizer")
        return self.assets | (tokenizer.changed_files(self.assets) if tokenizer else {})

    @overload
    def generate(
        self,
        input_ids: Prompts | str | list[str],
        *,
        max_new_tokens: int,
        return_logprobs: Literal[False] = False,
        **options: "Unpack[Options]",
    ) -> Tensor: ...
    @overload
    def generate(
        self,
        input_ids: Prompts | str | list[str],
        *,
        max_new_tokens: int,
        return_logprobs: Literal[True],
        **options: "Unpack[Options]",
    ) -> GenerateOutput: ...
    @shows_options
    def generate(
        self,
        input_ids: Prompts | str | list[str],
        *,
        max_new_tokens: int,
        return_logprobs: bool = False,
        **options: "Unpack[Options]",
    ) -> Tensor | GenerateOutput:
        """Continue the prompts; see `liger_models.generation.loop.generate`, and `Options` for the keyword arguments.

        If the prompts are texts, `tokenizer` encodes them. ``tokenizer.batch_decode`` converts the result into texts.
        """
        flags: Any = {"return_logprobs": return_logprobs}  # no overload takes a bool whose value is unknown
        output: Tensor | GenerateOutput = generate(
            self, self._encoded(input_ids), max_new_tokens=max_new_tokens, **flags, **options
        )
        return output

    @shows_options
    def stream(
        self, input_ids: Prompts | str | list[str], *, max_new_tokens: int, **options: "Unpack[Options]"
    ) -> Iterator[Tensor]:
        """Continue the prompts, yielding the tokens of each step; see `liger_models.generation.loop.stream`."""
        return stream(self, self._encoded(input_ids), max_new_tokens=max_new_tokens, **options)

    def rollout(
        self,
        prompts: Tensor | Sequence[Tensor] | Sequence[Sequence[int]] | list[str],
        *,
        max_new_tokens: int | Sequence[int],
        **options: Any,
    ) -> list[Completion]:
        """Continue many prompts of unequal length; see `liger_models.generation.rollouts.rollout`.

        If the prompts are texts, `tokenizer` encodes them. ``tokenizer.decode`` converts the tokens of a `Completion`
        into a text.
        """
        return rollout(self, self._encoded(prompts), max_new_tokens=max_new_tokens, **options)

    def _encoded(self, prompts: Any) -> Any:
        if isinstance(prompts, list | tuple) and prompts and isinstance(prompts[0], str):
            prompts = self.tokenizer.encode([*prompts])
        return self.tokenizer.encode(prompts) if isinstance(prompts, str) else prompts

    @classmethod
    def from_config(
        cls,
        config: CausalLMConfig,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: str | torch.device = "cpu",
        kernels: KernelOptions | None = None,
    ) -> "Self":
        """Create a model on ``device`` in ``dtype``. The weights are random and depend on ``torch.manual_seed``."""
        check_config(config)
        # On the meta device the constructor draws no weights.
        with torch.device("meta"):
            model = cls(config, kernels).to(as_dtype("from_config: dtype", dtype))
        model.check_buffers()
        model.to_empty(device=device)
        if model.device.type != "meta":  # meta tensors have no values, and drawing them takes seconds
            model.initialize()
        return model

    @classmethod
    @foreign_arguments("from_pretrained")
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
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
        keep_quantized: bool = False,
        head: bool | None = True,
    ) -> "Self":
        """Load a Hugging Face checkpoint from a local folder or, if there is no such folder, from the hub.

        Args:
            folder: folder with config.json and safetensors files. If there is no such folder, the name of a hub
                repository, ``owner/name``.
            dtype, device, kernels, strict, progress, shard, keep_quantized, head: see
                `liger_models.convert.load.load_pretrained`, which also lists the errors.
            revision, cache_dir, token, local_files_only, force_download: as for `from_hub`. They are unused if the
                checkpoint is in a local folder.
        """
        if is_hub_name(folder):
            return cls.from_hub(
                str(folder), revision=revision, dtype=dtype, device=device, kernels=kernels, strict=strict,
                progress=progress, cache_dir=cache_dir, token=token, local_files_only=local_files_only,
                force_download=force_download, shard=shard, keep_quantized=keep_quantized, head=head,
            )  # fmt: skip

        # A class with subclasses, such as `AutoLigerModel`, passes the call on to the model class of the checkpoint.
        chosen = cls._class_at(folder)
        load = partial(load_pretrained, cls) if chosen is cls else chosen.from_pretrained
        return load(
            folder, dtype=dtype, device=device, kernels=kernels, strict=strict, progress=progress, shard=shard,
            keep_quantized=keep_quantized, head=head,
        )  # fmt: skip

    @classmethod
    @foreign_arguments("from_hub")
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
        keep_quantized: bool = False,
        head: bool | None = True,
    ) -> "Self":
        """Download a checkpoint from the Hugging Face hub, unless it is in the local cache, and load it.

        Args:
            repo_id: name of the repository, such as "meta-llama/Llama-3.2-1B".
            revision: branch, tag or commit.
            dtype: dtype of the weights, or its name, such as "bf16"; None or "auto" for the dtype of the checkpoint.
            device: device onto which the weights are loaded, tensor by tensor.
            kernels: the parts of the model that run on fused kernels. Default: all parts.
            strict: whether unknown keys of config.json are an error instead of a warning.
            progress: whether rank 0 shows progress bars.
            cache_dir, token, local_files_only, force_download: as in huggingface_hub.
            shard: function that distributes the model's parameters before their values are loaded, such as
                `parallel.apply_fsdp`.
            keep_quantized: whether weights that are quantized in the checkpoint stay quantized and frozen; see
                `liger_models.convert.load.load_pretrained`.
            head: False leaves out the language-model head, and None leaves it out if the checkpoint has no head; see
                `liger_models.convert.load.load_pretrained`.
        """
        # Only the checkpoint's config.json determines the model class.
        folder = download(
            repo_id,
            cls._class_for,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
            strict=strict,
            progress=progress,
        )
        return cls._class_at(folder).from_pretrained(
            folder, dtype=dtype, device=device, kernels=kernels, strict=strict, progress=progress, shard=shard,
            keep_quantized=keep_quantized, head=head,
        )  # fmt: skip

    @classmethod
    def _class_for(cls, hf_config: Mapping[str, Any]) -> type["Self"]:
        """Return the model class for the content of a config.json."""
        return cls

    @classmethod
    def _class_at(cls, folder: str | PathLike[str]) -> type["Self"]:
        """Return the model class for the checkpoint in a folder."""
        return cls

    @foreign_arguments("save_pretrained")
    def save_pretrained(
        self,
        folder: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str = "5GB",
        auto_map: bool = False,
        mxfp4: str | PathLike[str] | None = None,
    ) -> None:
        """Write a Hugging Face checkpoint; see `liger_models.convert.save.save_pretrained`.

        All ranks must call this method if the model is sharded. After 30 seconds, a warning names the ranks that have
        not called the method.

        Raises:
            TimeoutError: the model is sharded, and a rank did not call this method within the process group's timeout.
        """
        if any(hasattr(parameter, "full_tensor") for parameter in self.parameters()):
            wait_for_ranks("save_pretrained")
        save_pretrained(self, folder, dtype=dtype, max_shard_size=max_shard_size, auto_map=auto_map, mxfp4=mxfp4)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        commit_message: str | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Upload the model to a hub repository, which is created if necessary; see `liger_models.convert.hub.push`.

        Returns:
            URL of the commit.

        Raises:
            ValueError: the model is sharded.
        """
        if any(hasattr(parameter, "full_tensor") for parameter in self.parameters()):
            raise ValueError(
                "push_to_hub: the model must not be sharded. Call save_pretrained on all ranks, and upload the folder "
                "from one of them."
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


def check_config(config: object, also: str = "") -> None:
    """Raise TypeError unless ``config`` is a dataclass.

    The text ``also`` names other accepted types. It becomes a part of the error message.
    """
    if not is_dataclass(config) or isinstance(config, type):
        is_place = isinstance(config, str | PathLike)
        raise TypeError(
            f"from_config: config must be an instance of a config class{also}, got "
            f"{repr(config) if is_place else type(config).__name__}. For a folder or a name on the hub call "
            "from_pretrained."
        )
