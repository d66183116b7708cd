"""The model class that a config.json asks for."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from liger_models.arch import get_arch
from liger_models.convert import model_type_of
from liger_models.convert.checkpoint import load_pretrained, read_json_config, read_model_type
from liger_models.convert.config_map import read_config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from liger_models.kernels.options import KernelOptions
    from liger_models.layers.causal_lm import CausalLM


class AutoLigerModel:
    """Builds the model that a config.json describes, of the class that its ``model_type`` names."""

    def __init__(self) -> None:
        raise TypeError("AutoLigerModel: has no instances. Use from_hub, from_pretrained or from_config.")

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        *,
        revision: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        kernels: "KernelOptions | None" = None,
        strict: bool = False,
        progress: bool = True,
        shard: "Callable[[CausalLM], object] | None" = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> "CausalLM":
        """The model of a repository; arguments as of ``hub.download`` and ``checkpoint.load_pretrained``."""
        from liger_models.convert.hub import download

        folder = download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
            strict=strict,
            progress=progress,
        )
        return cls.from_pretrained(
            folder, dtype=dtype, device=device, kernels=kernels, strict=strict, progress=progress, shard=shard
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        kernels: "KernelOptions | None" = None,
        strict: bool = False,
        progress: bool = True,
        shard: "Callable[[CausalLM], object] | None" = None,
    ) -> "CausalLM":
        """The model of a folder; arguments as of ``checkpoint.load_pretrained``."""
        model_class = get_arch(read_model_type(read_json_config(Path(folder))))
        return load_pretrained(
            model_class,
            folder,
            dtype=dtype,
            device=device,
            strict=strict,
            progress=progress,
            kernels=kernels,
            shard=shard,
        )

    @classmethod
    def from_config(
        cls,
        config: "Mapping[str, Any] | DataclassInstance",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kernels: "KernelOptions | None" = None,
        strict: bool = False,
    ) -> "CausalLM":
        """A model with fresh weights.

        Args:
            config: an architecture's config, or the content of a config.json.
            dtype: of the parameters.
            device: where they are made.
            kernels: handed to the model class.
            strict: an unknown key in a config.json is an error and not a warning.
        """
        if isinstance(config, Mapping):
            model_class = get_arch(read_model_type(config))
            parsed: Any = read_config(model_class.config_class, config, strict=strict)
        else:
            model_class = get_arch(model_type_of(type(config)))
            parsed = config
        return model_class.from_config(parsed, dtype=dtype, device=device, kernels=kernels)
