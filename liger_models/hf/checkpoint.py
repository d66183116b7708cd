"""Loading and saving of Hugging Face checkpoints through transformers' interface."""

import copy
import inspect
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import PushToHubMixin, logging
from transformers.utils.hub import create_and_tag_model_card

from liger_models.arch.auto import get_arch
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.config_map import read_config
from liger_models.convert.encodings import FLOATS, StoredTensor
from liger_models.convert.files import CONFIG, as_dtype, open_files, read_headers, read_json_config, read_whole, some
from liger_models.convert.format import format_of
from liger_models.convert.hub import download
from liger_models.convert.load import load_pretrained, of_whole_model, pick_map, read_assets
from liger_models.convert.save import save_pretrained
from liger_models.convert.tensors import as_stored, load_hf_tensors
from liger_models.distributed.ranks import rank, wait_for_ranks
from liger_models.hf.config import to_json
from liger_models.layers.linear import is_sharded

PREFIX = "model.decoder."
"""Prefix of the names of the decoder's parameters."""
GENERATION_CONFIG = "generation_config.json"
UPLOAD = frozenset(inspect.signature(PushToHubMixin.push_to_hub).parameters) - {"self", "max_shard_size"}
"""Names of the arguments of ``push_to_hub`` that concern the upload."""
logger = logging.get_logger(__name__)

_IGNORED = [
    "_commit_hash",
    "_fast_init",
    "_from_auto",
    "_from_pipeline",
    "code_revision",
    "low_cpu_mem_usage",
    "max_memory",
    "offload_buffers",
    "offload_folder",
    "offload_state_dict",
    "proxies",
    "tqdm_class",
    "trust_remote_code",
    "use_safetensors",
    "weights_only",
    "disable_mmap",
    "mirror",
]
"""Arguments of transformers' ``from_pretrained`` that are accepted but have no effect."""


class Mismatch(NamedTuple):
    """A tensor whose shape in a checkpoint differs from its shape in the model. transformers reports the same
    fields."""

    name: str
    stored: tuple[int, ...]
    expected: tuple[int, ...]


class Loading:
    """Mixin with `from_pretrained`, for models with a head and for the body alone (a model without its head)."""

    config_class: Any
    config: Any
    generation_config: Any
    get_decoder: Any

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *,
        config: PreTrainedConfig | str | os.PathLike[str] | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        revision: str | None = None,
        subfolder: str = "",
        generation_config: GenerationConfig | None = None,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """Load a model from a checkpoint, tensor by tensor. The model is in evaluation mode.

        Args:
            pretrained_model_name_or_path: folder, or name on the hub; None if ``config`` and ``state_dict`` are
                given.
            config: configuration that replaces the checkpoint's configuration.
            dtype: dtype of the weights, or the dtype's name, such as "bf16"; None or "auto" for the checkpoint's dtype.
            torch_dtype: older name of ``dtype``.
            device_map: one device, "auto" (the accelerator, or the CPU if there is none), or a dict that contains only
                one device. By default, the device of ``torch.set_default_device``.
            cache_dir, force_download, local_files_only, token, revision: as in huggingface_hub.
            subfolder: subfolder of a local folder.
            generation_config: defaults for ``generate`` that replace the checkpoint's defaults.
            output_loading_info: whether to also return a dict of sets. The sets ``missing_keys`` and
                ``mismatched_keys`` list the tensors that have random values. Any other mismatch is an error.
            ignore_mismatched_sizes: whether to warn, instead of raising an error, about tensors that have another shape
                in the checkpoint, and about a head that the checkpoint lacks. These tensors keep random values.
            state_dict: tensors to load instead of the checkpoint's tensors, by their names in a checkpoint or in the
                model.
            options: values for fields of the configuration, such as ``use_cache`` or ``attn_implementation``. Arguments
                of transformers that only determine how the model is loaded are ignored.

        Raises:
            FileNotFoundError: the folder or a file in it is missing.
            ValueError: the class is a base class, the content of a file does not match the model, or an argument is not
                supported.
        """
        # The base classes have no configuration class. Only the classes of model types can load.
        if not hasattr(cls.config_class, "from_pretrained"):
            raise ValueError(
                f"from_pretrained: {cls.__name__} must be a class of a family, such as LlamaForCausalLM, got the base "
                "class. Call liger_models.hf.register(), then AutoModelForCausalLM.from_pretrained, which chooses it."
            )
        # Without a folder, the arguments must be a configuration and tensors.
        dtype = torch_dtype if dtype is None else dtype
        if pretrained_model_name_or_path is None:
            if not isinstance(config, PreTrainedConfig) or state_dict is None:
                raise ValueError(
                    "from_pretrained: without a folder there must be config and state_dict, got "
                    f"{type(config).__name__} and {type(state_dict).__name__}. Pass both, or the name of a checkpoint."
                )
            model = cls._from_state_dict(config, state_dict, dtype, _device(device_map))
            model.generation_config = generation_config or GenerationConfig.from_model_config(config)
            return (model, _loading_info([], [])) if output_loading_info else model

        # Find the folder on this machine, or download it.
        folder = Path(pretrained_model_name_or_path) / subfolder
        if not folder.is_dir():
            if subfolder != "":
                raise ValueError(
                    f"from_pretrained: subfolder must be in a folder on this machine, got {subfolder!r} of "
                    f"{pretrained_model_name_or_path}. Download it first."
                )
            folder = download(
                str(pretrained_model_name_or_path), lambda hf: get_arch(hf["model_type"]), revision=revision,
                cache_dir=cache_dir, token=token, local_files_only=local_files_only, force_download=force_download,
            )  # fmt: skip

        # Build the configuration. Each option must be one of its fields, or an argument without effect.
        config_: Any = config
        if not isinstance(config, PreTrainedConfig):
            config_, options = cls.config_class.from_pretrained(config or folder, return_unused_kwargs=True, **options)
        config_ = copy.deepcopy(config_)  # the caller's configuration is not changed
        if "attn_implementation" in options:
            config_._attn_implementation = options.pop("attn_implementation")
        _check_options(options, config_, folder)

        # Build the model with its weights.
        device = torch.device("meta") if _without_values() else _device(device_map)
        missing: list[str] = []
        mismatched: list[Mismatch] = []
        if state_dict is None:
            model, missing, mismatched = cls._load(config_, folder, dtype, device, ignore_mismatched_sizes)
        else:
            model = cls._from_state_dict(config_, state_dict, dtype, device)
        # Warn about random weights, and update the fields of the configuration that describe the weights.
        if missing or mismatched:
            drawn = [*missing, *(f"{name} {list(old)} -> {list(new)}" for name, old, new in mismatched)]
            logger.warning(f"{cls.__name__}: weights that {folder} lacks are drawn: {some(drawn)}. Train the model.")
        decoder = model.get_decoder().decoder
        if hasattr(config_, "quantization_config"):  # MXFP4 weights were dequantized when they were read
            del config_.quantization_config
        config_.dtype = decoder.dtype
        config_.name_or_path = model.name_or_path = str(pretrained_model_name_or_path)

        # Set the defaults for generate.
        if generation_config is not None:
            model.generation_config = copy.deepcopy(generation_config)
        elif GENERATION_CONFIG in decoder.assets:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        else:  # older checkpoints have the defaults in config.json
            model.generation_config = GenerationConfig.from_pretrained(
                folder, config_file_name="config.json", _from_model_config=True
            )
        if device_map is not None:
            model.hf_device_map = {"": decoder.device}
        model.eval()
        return (model, _loading_info(missing, mismatched)) if output_loading_info else model

    @classmethod
    def _load(
        cls,
        config: PreTrainedConfig,
        folder: Path,
        dtype: torch.dtype | str | None,
        device: torch.device,
        ignore_mismatched_sizes: bool,
    ) -> tuple[Any, list[str], list[Mismatch]]:
        """Load a model from a folder. Return the model, and lists of the missing and the mismatched tensors.

        The missing and the mismatched tensors get random values.
        """
        arch = get_arch(config.model_type)
        if getattr(config, "tie_word_embeddings", False) and not _is_tied(arch, folder):
            config.tie_word_embeddings = False
        hf_config = to_json(config)
        missing: list[str] = []
        mismatched: list[Mismatch] = []
        # Compare the headers of the files with a model on the meta device.
        if ignore_mismatched_sizes:
            stored = read_headers(folder)
            ours = read_config(arch.config_class, hf_config, tensors=len(stored))
            with torch.device("meta"):
                twin = arch(ours)
            stored = of_whole_model(stored, format_of(arch).file_maps(ours))
            missing, mismatched = find_missing_head(twin, stored), find_mismatched(twin, stored)
        # `load_pretrained` allocates no memory for random weights, but rejects incomplete checkpoints.
        if missing or mismatched:
            decoder = arch.from_config(ours, dtype=as_dtype_of(stored, dtype), device=device)
            fill_decoder(decoder, stored, [*missing, *(name for name, _, _ in mismatched)])
            decoder.hf_config, decoder.assets = hf_config, read_assets(folder, hf_config)
        else:
            decoder = load_pretrained(arch, folder, dtype=dtype, device=device, hf_config=hf_config)
        return cls(config, decoder), missing, mismatched  # type: ignore[call-arg]

    @classmethod
    def _from_state_dict(
        cls,
        config: PreTrainedConfig,
        state_dict: Mapping[str, Tensor],
        dtype: torch.dtype | str | None,
        device: torch.device,
    ) -> Any:
        """Build a model from the tensors of a state dict, in ``dtype``; None or "auto" for the tensors' dtype."""
        floats = (tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point())
        stored = next(floats, torch.float32)
        target = stored if dtype in (None, "auto") else as_dtype("from_pretrained: dtype", dtype)
        made: Any = cls
        model = made(config).to(device, target)
        model.load_state_dict(state_dict)
        return model.eval()

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing. A checkpoint needs no copy of the class's code, because the installed package has the class."""


class Checkpoint(Loading):
    """Mixin for loading and saving a model with a head."""

    model: Any

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
        """Write a Hugging Face checkpoint: the tensors, the configuration, and all other files that were loaded.

        Args:
            save_directory: the folder, which is created if it does not exist.
            is_main_process: whether this rank writes an unsharded model. By default, only rank 0 writes. For a sharded
                model, the value is ignored, and all ranks together save the model.
            state_dict: unsharded tensors to save instead of the parameters, by the names that ``state_dict()`` uses. If
                the dict is empty, no tensors are written. Trainer passes an empty dict if DeepSpeed writes the tensors
                in shards.
            push_to_hub: whether rank 0 uploads the written files; ``options`` are then arguments of the method
                ``push_to_hub``. The model must not be sharded.
            max_shard_size: maximum size of a file, in bytes or as "5GB".
            auto_map: see `liger_models.convert.save.save_pretrained`.
            options: arguments of transformers that do not change the format. They are ignored.

        Raises:
            ValueError: parameters have no name in a checkpoint, an option is not supported, or a sharded model would
                have to be uploaded.
        """
        hf_model: Any = self
        if getattr(self, "_hf_peft_config_loaded", False):  # only the adapter is saved
            is_writer = writes(is_main_process)
            super().save_pretrained(  # type: ignore[misc]
                save_directory, is_writer, state_dict, push_to_hub, max_shard_size, **options
            )
            return

        if push_to_hub:
            check_upload(hf_model)
        # The options in `UPLOAD` are for the upload. All other known options have no effect.
        usual = UPLOAD | {"safe_serialization", "save_peft_format", "save_original_format", "save_function"}
        unknown = sorted(name for name in options.keys() - usual if options[name] not in (None, False))
        if unknown:
            raise ValueError(f"save_pretrained: options must be known ones, got {', '.join(unknown)}. Leave them out.")
        if self._without_tensors(save_directory, is_main_process, state_dict):
            return

        # Collect the tensors under the names of the decoder's parameters. All ranks gather sharded tensors together.
        self.model.apply_edits()
        parameters = dict(hf_model.named_parameters(remove_duplicate=False))
        sharded = any(map(is_sharded, parameters.values()))
        if state_dict is None and sharded:
            wait_for_ranks(f"save_pretrained {save_directory}")
        elif not writes(is_main_process):
            return
        tensors = parameters if state_dict is None else state_dict
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        decoder = self.model.decoder
        head = tensors.get("lm_head.weight", decoder.lm_head.weight)  # FSDP1 leaves no rows in the parameter
        if decoder.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        elif len(head) != decoder.config.vocab_size:
            raise ValueError(
                "save_pretrained: embedding and head must have the same number of rows, got "
                f"{len(tensors['embed_tokens.weight'])} and {len(head)}. Replace both, or call resize_token_embeddings."
            )

        # Prepare the other files. The model's current defaults for generate replace the loaded defaults.
        config = copy.deepcopy(self.config)
        config.architectures, config.dtype = [type(self).__name__], tensors["embed_tokens.weight"].dtype
        assets = {GENERATION_CONFIG: self.generation_config.to_json_string().encode()}
        decoder.assets = decoder.assets | assets
        with uploads(hf_model, save_directory, push_to_hub, options):
            save_pretrained(
                decoder, save_directory, max_shard_size=max_shard_size, auto_map=auto_map, hf_config=to_json(config),
                tensors=tensors,
            )  # fmt: skip

    def _without_tensors(
        self, folder: str | os.PathLike[str], is_main_process: bool | None, state_dict: Mapping[str, Tensor] | None
    ) -> bool:
        """If ``state_dict`` is an empty dict, write only the configurations. Return whether it is an empty dict."""
        if state_dict is None or state_dict:
            return False
        if writes(is_main_process):
            config = copy.deepcopy(self.config)
            config.architectures = [type(self).__name__]
            config.save_pretrained(folder)
            if getattr(self, "generation_config", None) is not None:
                self.generation_config.save_pretrained(folder)
        return True

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters by the names that `state_dict` uses, or by the names in a Hugging Face checkpoint.

        With ``strict=False``, a part of a checkpoint, such as one of its files, can be loaded.
        """
        # Load by the names of the parameters in memory.
        if any(name.startswith(PREFIX) for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]

        # Load by the names of a checkpoint: choose the layout that has most of these names.
        self.model.apply_edits()
        decoder = self.model.decoder
        parameters = dict(decoder.named_parameters())
        weights = pick_map(format_of(type(decoder)).weight_maps(decoder.config), state_dict, parameters)
        names = [name for expression in weights.entries.values() for name in expression.names()]
        missing = [name for name in names if name not in state_dict]
        known = set(names)
        unexpected = [name for name in state_dict if name not in known and not weights.passes_over(name)]
        if strict and (missing or unexpected):
            raise ValueError(
                "load_state_dict: the names must be those of the model, or of its checkpoint. Missing: "
                f"{some(missing) or 'none'}. Unexpected: {some(unexpected) or 'none'}. strict=False loads the others."
            )

        # Check all shapes before anything changes, because copying would broadcast a tensor with fewer elements.
        if not assign and any(parameter.is_meta for parameter in parameters.values()):
            raise ValueError(
                "load_state_dict: the model must have weights to copy into, got parameters on the meta device. Pass "
                "assign=True, or load a folder by from_pretrained."
            )
        shapes = {name: tensor.shape for name, tensor in weights.shapes(parameters).items()}
        check_shapes("load_state_dict", find_mismatched_shapes(shapes, state_dict))

        # Pack the tensors of each parameter, and copy or assign the result.
        with torch.no_grad(), decoder._sharing():
            for ours, expression in weights.entries.items():
                parameter = parameters[ours]
                tensors = {name: state_dict[name] for name in expression.names() if name in state_dict}
                if not assign:
                    tensors = {name: tensor.to(parameter.device, parameter.dtype) for name, tensor in tensors.items()}
                if not tensors:
                    continue
                if len(tensors) < len(expression.names()):  # the parameter's other tensors keep their values
                    tensors = expression.unpack(parameter.detach()) | tensors
                packed = expression.pack(tensors)
                if assign:
                    owner, _, attribute = ours.rpartition(".")
                    new = nn.Parameter(packed.contiguous(), parameter.requires_grad)
                    setattr(decoder.get_submodule(owner), attribute, new)
                else:
                    parameter.copy_(packed)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)


def find_mismatched_shapes(expected: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Mismatch]:
    """Return the tensors of a checkpoint or a state dict whose shapes differ from the shapes in the model."""
    return [
        Mismatch(name, tuple(stored[name].shape), tuple(shape))
        for name, shape in expected.items()
        if name in stored and tuple(stored[name].shape) != tuple(shape)
    ]


def find_mismatched(decoder: CausalLM, stored: Mapping[str, StoredTensor]) -> list[Mismatch]:
    """Return the tensors of a checkpoint whose shapes differ from the shapes in the model."""
    parameters = dict(decoder.named_parameters())
    weights = pick_map(format_of(type(decoder)).weight_maps(decoder.config), stored, parameters)
    return find_mismatched_shapes({name: tensor.shape for name, tensor in weights.shapes(parameters).items()}, stored)


def _is_tied(arch: type[CausalLM], folder: Path) -> bool:
    """Return False only if the family has an untied head by default and config.json does not say whether the head is
    tied.

    If config.json does not say whether the head is tied, transformers may tie it although the published model has an
    untied head (Mistral Small 3). The head of the published model would then be lost.
    """
    hf = read_json_config(folder) if (folder / CONFIG).is_file() else {}
    if "tie_word_embeddings" in hf or hf.get("model_type") != format_of(arch).model_type:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # building the model warns about the same keys
        return bool(read_config(arch.config_class, hf).tie_word_embeddings)


def find_missing_head(decoder: CausalLM, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return the names of the head's tensors that a checkpoint lacks."""
    parameters = dict(decoder.named_parameters())
    entries = pick_map(format_of(type(decoder)).weight_maps(decoder.config), stored, parameters).entries
    names = [name for ours in entries if ours.startswith("lm_head.") for name in entries[ours].names()]
    return [name for name in names if name not in stored]


def check_shapes(where: str, mismatched: list[Mismatch]) -> None:
    """Raise ValueError unless ``mismatched``, the list of tensors with other shapes than in the model, is empty."""
    if mismatched:
        differences = [f"{name} {list(old)}, not {list(new)}" for name, old, new in mismatched]
        raise ValueError(
            f"{where}: tensors must have the shapes of the model, got {some(differences)}. Load the model that they "
            "belong to, or draw new ones: from_pretrained(..., ignore_mismatched_sizes=True)."
        )


def fill_decoder(decoder: CausalLM, stored: Mapping[str, StoredTensor], names: Collection[str]) -> None:
    """Read a checkpoint into a model, tensor by tensor. The tensors in ``names`` keep their random values.

    Args:
        decoder: the model.
        stored: the checkpoint's tensors by name.
        names: names of the tensors that are not read, because the checkpoint lacks them or stores them in other shapes.
    """
    parameters = dict(decoder.named_parameters())
    weights = pick_map(format_of(type(decoder)).weight_maps(decoder.config), stored, parameters)
    # Copy the tensors that keep their random values, under their names in a checkpoint. A packed parameter may consist
    # of both random tensors and tensors that are read.
    drawn = {
        name: tensor.clone()
        for ours, expression in weights.entries.items()
        if {*names} & {*expression.names()}
        for name, tensor in expression.unpack(parameters[ours].detach()).items()
        if name in names
    }

    def read() -> Iterator[tuple[str, Tensor]]:
        yield from drawn.items()
        for name, tensor in stored.items():
            if name in drawn:
                continue
            # A tensor that belongs to no parameter is either kept for the next save or skipped.
            with open_files() as files:
                if name.startswith(weights.kept):
                    decoder.kept_tensors[name] = read_whole(files, tensor).clone()
                elif not weights.passes_over(name) or not drawn:
                    yield name, read_whole(files, tensor)

    load_hf_tensors(decoder, read())


def load_body(
    where: str, decoder: CausalLM, folder: Path, stored: Mapping[str, StoredTensor], *, draws: bool
) -> list[Mismatch]:
    """Read a checkpoint into a decoder whose head has no weight of its own. Return the tensors with mismatched shapes.

    Args:
        where: name of the class, for errors.
        decoder: the model, whose head is tied.
        folder: the checkpoint.
        stored: the checkpoint's tensors by name. Tensors that belong to heads are not read.
        draws: whether parameters keep their random values if their tensors have other shapes in the checkpoint.

    Raises:
        ValueError: tensors are missing or unexpected, or shapes do not match and ``draws`` is False.
    """
    heads = ("lm_head.weight", "lm_head.bias", "score.weight")
    body = {name: tensor for name, tensor in stored.items() if not name.endswith(heads)}
    body = of_whole_model(body, format_of(type(decoder)).file_maps(decoder.config))
    mismatched = find_mismatched(decoder, body)
    if not draws:
        check_shapes(f"{where}: {folder}", mismatched)
    fill_decoder(decoder, body, [name for name, _, _ in mismatched])
    return mismatched


def as_dtype_of(stored: Mapping[str, StoredTensor], dtype: torch.dtype | str | None) -> torch.dtype:
    """Return the dtype named ``dtype``. For None and "auto", return the dtype of the checkpoint's first tensor."""
    if dtype is None or dtype == "auto":
        return FLOATS.get(next(iter(stored.values())).dtype, torch.bfloat16)
    return as_dtype("from_pretrained: dtype", dtype)


def body_tensors(decoder: CausalLM, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the decoder's tensors, except the head's, by their checkpoint names, gathered from all ranks.

    Args:
        decoder: the model.
        parameters: the tensors by the names of the decoder's parameters. The tensors of the head are ignored.
    """
    # If the head is not tied, the weight map requires the head's parameters. Pass empty tensors, and drop them below.
    entries = format_of(type(decoder)).weight_map(decoder.config).entries
    head = {name: torch.empty(0, device="cpu") for name in entries if name.startswith("lm_head.")}
    body = {name: tensor for name, tensor in parameters.items() if not name.startswith("lm_head.")}
    stored = as_stored("save_pretrained", decoder, merge=False, parameters=body | head)
    heads = {theirs for name in head for theirs in entries[name].names()}
    return {name: tensor for name, tensor in stored.unpack(stored.gather(), None) if name not in heads}


def _loading_info(missing: list[str], mismatched: list[Mismatch]) -> dict[str, Any]:
    """Return the second result of ``from_pretrained(..., output_loading_info=True)``, as in transformers."""
    return {
        "missing_keys": {*missing},
        "unexpected_keys": set(),
        "mismatched_keys": {*mismatched},
        "error_msgs": [],
    }


def _check_options(options: dict[str, Any], config: PreTrainedConfig, folder: Path) -> None:
    """Raise ValueError if the folder contains an adapter, or if arguments of ``from_pretrained`` are not supported."""
    adapter = (options.pop("adapter_kwargs", None) or {}).get("_adapter_model_path")
    if (folder / "adapter_config.json").is_file():
        adapter = folder
    if adapter is not None:
        raise ValueError(
            f"from_pretrained: {adapter} must hold a model, got an adapter. Load the model that it belongs to and call "
            "peft.PeftModel.from_pretrained(model, folder)."
        )
    quantization = options.pop("quantization_config", None)
    if quantization is not None:
        raise ValueError(
            f"from_pretrained: quantization_config must not be given, got {type(quantization).__name__}. For 4-bit "
            "weights (load_in_4bit) call liger_models.adapters.apply_lora and then quantize_base on "
            "model.model.decoder, or load with the class of transformers."
        )
    unknown = sorted(name for name in options.keys() - set(_IGNORED) if options[name] not in (None, False))
    if unknown:
        raise ValueError(
            f"from_pretrained: arguments must be those of this method or fields of {type(config).__name__}, got "
            f"{', '.join(unknown)}. Leave them out, or load with the class of transformers."
        )


def writes(is_main_process: bool | None, *, sharded: bool = False) -> bool:
    """Return whether this rank writes the files of a checkpoint.

    Args:
        is_main_process: the caller's argument. With None, only rank 0 writes, and all other ranks log a warning.
        sharded: whether all ranks gather the tensors together. Only rank 0 may then write.
    """
    if sharded:
        return rank() == 0 and is_main_process is not False
    if is_main_process is None and rank() != 0:
        logger.warning_once(
            f"save_pretrained: rank {rank()} writes nothing, because only rank 0 writes a model that is not sharded. "
            "To write on this rank, too, pass is_main_process=True and another folder."
        )
    return rank() == 0 if is_main_process is None else is_main_process


@contextmanager
def uploads(
    model: Any, folder: str | os.PathLike[str], push_to_hub: bool, options: Mapping[str, Any]
) -> Iterator[None]:
    """Context manager that uploads the files that are written to a folder within the context. Only rank 0 uploads.

    Args:
        model: a model of transformers.
        folder: the folder, which is created if it does not exist.
        push_to_hub: whether to upload anything.
        options: arguments of the method ``push_to_hub``. All other names are ignored.
    """
    if not push_to_hub or rank() != 0:
        yield
        return
    # Create the repository before anything is written.
    given = {name: options.get(name) for name in UPLOAD}
    repo_id, private, tags = (given.pop(name) for name in ("repo_id", "private", "tags"))
    token = given["token"]
    repo_id = HfApi().create_repo(repo_id or Path(folder).name, private=private, token=token, exist_ok=True).repo_id
    Path(folder).mkdir(parents=True, exist_ok=True)
    earlier = model._get_files_timestamps(folder)
    yield
    card = create_and_tag_model_card(repo_id, tags or model.model_tags, token=token)
    card.save(Path(folder) / "README.md")
    model._upload_modified_files(folder, repo_id, earlier, **given)


def check_upload(model: nn.Module) -> None:
    """Raise ValueError if ``model`` can't be uploaded because it is sharded."""
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "push_to_hub: the model must not be sharded. Call save_pretrained on all ranks, and upload the folder from "
            "one of them."
        )


def _without_values() -> bool:
    """Return whether Accelerate's ``init_empty_weights`` is active, within which new parameters have no values."""
    # Accelerate replaces `register_parameter` by a function that moves every new parameter to the meta device.
    probe = nn.Module()
    probe.weight = nn.Parameter(torch.empty(0, device="cpu"))
    return probe.weight.is_meta


def _device(device_map: Any) -> torch.device:
    """Convert a ``device_map`` with a single device to the device."""
    devices = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    if len(devices) != 1 or devices & {"disk", "balanced", "balanced_low_0", "sequential"}:
        raise ValueError(
            f"from_pretrained: device_map must name one device, or be 'auto', got {device_map!r}. To spread a model "
            "over devices use parallel.apply_fsdp or apply_tp."
        )
    (device,) = devices
    if device is None:
        return torch.get_default_device()
    # A number is the index of an accelerator. "auto" is the current accelerator, or the CPU if there is none.
    if device != "auto" and not isinstance(device, int):
        return torch.device(device)

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device, int):
        return torch.device("cuda" if accelerator is None else accelerator.type, device)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
