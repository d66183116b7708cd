"""A model as a tree of modules with transformers' names, each projection a linear layer of its own: what PEFT adapts.

PEFT finds modules by their names and replaces them. Packed projections have other names and hold several matrices, so
they are taken apart first. The blocks, attention and the loss remain those of the model.
"""

import dataclasses
import functools
import os
import posixpath
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn

from liger_models.adapters.lora import adaptable_layers, matches
from liger_models.adapters.lora_layers import ADAPTED, short_name
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.files import CONFIG, read_json
from liger_models.convert.format import format_of
from liger_models.convert.weight_map import Expression, Name
from liger_models.layers.layer import Layer
from liger_models.layers.linear import is_sharded
from liger_models.layers.lm_head import LigerLMHead


def unpack_projections(model: nn.Module) -> "UnpackedModel":
    """Take the packed projections of a model apart, in place, and give its modules the names of transformers' modules.

    Call it before PEFT: ``get_peft_model(unpack_projections(model), config)``. Each projection becomes a linear layer
    of its own (q_proj, k_proj, v_proj, gate_proj, up_proj), so the fused ops that need packed weights do not run.

    Args:
        model: a `CausalLM`, or a module that holds one and calls it. Its weights are moved, not shared.

    Returns:
        A module that computes what ``model`` computes. Its ``pack`` returns ``model`` with packed projections, and its
        ``save_pretrained`` writes a Hugging Face checkpoint.

    Raises:
        ValueError: the model is sharded, has adapters, or has linear layers of another class.
    """
    models = [each for each in model.modules() if isinstance(each, CausalLM)]
    where = f"unpack_projections: {type(model).__name__}"
    if len(models) != 1:
        raise ValueError(f"{where} must be or hold one CausalLM, got {len(models)}. Load a model of this package.")
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            f"{where} must not be sharded, got sharded parameters. For several GPUs use apply_lora and apply_fsdp."
        )
    others = {type(each).__name__ for each in model.modules() if isinstance(each, nn.Linear) and each._parameters}
    others -= {kind.__name__ for kind in ADAPTED}
    if others or any(isinstance(each, UnpackedLinear) for each in model.modules()):
        raise ValueError(
            f"{where} must have packed projections and no other linear layers than nn.Linear, got "
            f"{', '.join(sorted(others)) or 'a model that is unpacked already'}. Unpack it before anything replaces "
            "layers, and once: use what the first call returned."
        )
    return UnpackedModel(model, models[0])


class UnpackedLinear(Layer):
    """A packed projection [C] -> [O], computed by a linear layer for each of the checkpoint's matrices in it.

    Args:
        packed: the projection.
        weight: its weight in terms of the checkpoint's matrices.
        bias: its bias in terms of the checkpoint's vectors; None if it has none.
    """

    def __init__(self, packed: nn.Linear, weight: Expression, bias: Expression | None) -> None:
        super().__init__()
        self.weight_expression, self.bias_expression = weight, bias
        biases = {} if bias is None else bias.unpack(packed.bias)
        for name, matrix in weight.unpack(packed.weight).items():
            part = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
            part.weight = _like(packed.weight, matrix)
            if biases:
                part.bias = _like(packed.bias, biases[name.removesuffix("weight") + "bias"])
            self.add_module(short_name(name), part)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., O], in the order of the packed rows."""
        names = self.weight_expression.names()
        rows = {name: part(x).flatten(0, -2) for name, part in zip(names, self.children(), strict=True)}
        packed = torch.vmap(self.weight_expression.pack)(rows)
        y: Tensor = packed.unflatten(0, x.shape[:-1])
        return y

    def packed(self) -> nn.Linear:
        """The projection as one linear layer with new parameters. The parts must be linear layers without adapters."""
        parts: list[Any] = [*self.children()]
        names = self.weight_expression.names()
        weight = self.weight_expression.pack({name: part.weight for name, part in zip(names, parts, strict=True)})
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta").train(self.training)
        linear.weight = _like(parts[0].weight, weight)
        if self.bias_expression is not None:
            names = self.bias_expression.names()
            biases = {name: part.bias for name, part in zip(names, parts, strict=True)}
            linear.bias = _like(parts[0].bias, self.bias_expression.pack(biases))
        return linear


class UnpackedLMHead(Layer):
    """`LigerLMHead`, but no `nn.Linear`: PEFT would replace it by a layer without the loss."""

    forward = LigerLMHead.forward
    operands, product = LigerLMHead.operands, LigerLMHead.product

    def extra_repr(self) -> str:
        """What to do instead of giving it an adapter, for PEFT's error."""
        return "has the loss inside: train it with modules_to_save, or adapt it with liger_models.adapters.apply_lora"


class HFModules(nn.Module):
    """A node of the tree. A module that replaces another one here also replaces it in the model."""

    owners: dict[str, tuple[nn.Module, str]]
    """Name of a submodule -> the module of the model that has it, and its name there."""

    def __init__(self) -> None:
        super().__init__()
        self.owners = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", {}):
            if name not in self.owners:
                raise ValueError(
                    f"{name}: PEFT must replace linear layers, norms, the embedding or the head, got another module. "
                    "Experts, routers and patch embeddings have no adapters: list other names in target_modules or "
                    "modules_to_save."
                )
            setattr(*self.owners[name], value)
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """For PEFT's error."""
        return f"{', '.join(self._parameters)}, which cannot have adapters" if self._parameters else ""


class UnpackedModel(HFModules):
    """A model with the names of transformers' modules; see `unpack_projections`.

    Attributes that it lacks are the model's: ``generate``, ``set_checkpointing``, ``tokenizer``.
    """

    is_gradient_checkpointing = False
    """Otherwise PEFT lets the embedding's output require a gradient, which no policy of this package needs."""
    inner: nn.Module
    """The model that was given to `unpack_projections`."""
    causal_lm: CausalLM
    """The same, or the model in it."""
    names: set[str]
    """The names of the parameters without adapters."""
    fixed: list[str]
    """The checkpoint's names of what cannot be adapted: experts, routers, patch embeddings, parameters of their own."""
    skipped: set[str]
    """Ends of those names that are linear layers in transformers, or hold experts."""
    checked: set[str]
    """Adapters whose configurations are supported."""

    def __init__(self, inner: nn.Module, causal_lm: CausalLM) -> None:
        super().__init__()
        self.__dict__.update(inner=inner, causal_lm=causal_lm, fixed=[], skipped=set(), checked=set())
        self.generation_config = getattr(inner, "generation_config", None)  # PEFT reads both here
        self.name_or_path = getattr(inner, "name_or_path", None)
        entries = format_of(type(causal_lm)).module_map(causal_lm.config).entries
        linears = adaptable_layers(causal_lm)
        for path, module in [*causal_lm.named_modules()]:
            full = {name: f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)}
            own = {name: entries.get(each, Name(each)) for name, each in full.items()}  # a tied head has no entry
            homes = {each.rpartition(".")[0] for expression in own.values() for each in expression.names()}
            same = len(homes) == 1 and all(
                isinstance(expression, Name) and expression.name.endswith(f".{name}")
                for name, expression in own.items()
            )
            leaf = not any(module.children()) and (path in linears or not isinstance(module, nn.Linear))
            parent, _, last = path.rpartition(".")
            owner = causal_lm.get_submodule(parent)
            if same and leaf:
                if isinstance(module, LigerLMHead):
                    setattr(owner, last, _converted(module, UnpackedLMHead))
                self._place(homes.pop(), owner, last)
            elif path in linears:
                unpacked = UnpackedLinear(linears[path][0], own["weight"], own.get("bias")).train(module.training)
                setattr(owner, last, unpacked)
                module._parameters = dict.fromkeys(module._parameters)  # frees the memory
                for name in own["weight"].names():
                    self._place(name.removesuffix(".weight"), unpacked, short_name(name))
            else:
                for name, expression in own.items():
                    self._hold(module, name, expression)
        self._place_others()
        scale = causal_lm.embed_tokens.scale
        if scale is not None:  # PEFT scales what an adapter adds to the embedding by this attribute
            vars(causal_lm.embed_tokens)["embed_scale"] = scale
        self.__dict__["names"] = {name for name, _ in self.named_parameters(remove_duplicate=False)}

    def _place(self, path: str, owner: nn.Module, name: str) -> None:
        """Let the submodule ``name`` of ``owner`` be at ``path`` in the tree."""
        parent, _, last = path.rpartition(".")
        node = self._node(parent)
        node._modules[last] = getattr(owner, name)
        node.owners[last] = owner, name

    def _place_others(self) -> None:
        """Let what the model has beside its `CausalLM`, such as a head for classes, be in the tree by its own names."""
        for path, holder in self.inner.named_modules():
            if holder is self.causal_lm or self.causal_lm not in holder.modules():
                continue
            for name, module in holder.named_children():
                full = f"{path}.{name}".lstrip(".")
                if self.causal_lm in module.modules():
                    continue
                if name in self._node(path)._modules:
                    raise ValueError(
                        f"unpack_projections: {type(self.inner).__name__} must have modules of other names beside its "
                        f"{type(self.causal_lm).__name__}, got {full}, which transformers' model has as well. Rename "
                        "it."
                    )
                self._place(full, holder, name)
            self._node(path)._parameters.update(holder._parameters)

    def _hold(self, module: nn.Module, name: str, expression: Expression) -> None:
        """Let a parameter that PEFT cannot adapt be in the tree, which then has all parameters."""
        parameter: Any = module._parameters[name]
        theirs = expression.names()
        self.fixed.extend(each.removesuffix(".weight") for each in theirs)
        shapes = expression.unpack(torch.empty_like(parameter, device="meta"))
        if parameter.dim() == 3 or (isinstance(module, nn.Linear) and shapes[theirs[0]].dim() == 2):
            self.skipped.update(short_name(each) for each in theirs if each.endswith(("weight", "_proj")))
        home, _, last = theirs[0].rpartition(".")
        if len(theirs) > 1:  # experts
            home, last = posixpath.commonpath([each.replace(".", "/") for each in theirs]).replace("/", "."), name
        self._node(home)._parameters[last] = parameter

    def _node(self, path: str) -> HFModules:
        node: Any = self
        for name in path.split(".") if path else []:
            if name not in node._modules:
                node._modules[name] = HFModules()
            node = node._modules[name]
        return node  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "peft_config":  # PEFT sets it when it has replaced the modules for the first adapter
            self.checked = set()
            self._check_configs(value)
        if name == "prepare_inputs_for_generation" and hasattr(self.inner, name):
            setattr(self.inner, name, value)  # PEFT sets it while it generates, to add prompt tokens that were learnt
        else:
            super().__setattr__(name, value)

    def _check_configs(self, configs: dict[str, Any]) -> None:
        """Check the configurations of new adapters."""
        for name in sorted(configs.keys() - self.checked):
            self._check_config(configs[name])
            self.checked.add(name)

    def _check_config(self, config: Any) -> None:
        """Raise ValueError for what PEFT would pass over in silence."""
        targets = getattr(config, "target_modules", None) or []
        for target in [] if isinstance(targets, str) or config.inference_mode else sorted(targets):
            found = next((name for name in self.fixed if matches(name, target)), None)
            if found is not None:
                raise ValueError(
                    f"target_modules must name linear layers, got {target!r}, which means {found} as well. Experts, "
                    "routers and patch embeddings have no adapters. Leave it out, or give longer names."
                )
        parameters = getattr(config, "target_parameters", None)
        if parameters:
            raise ValueError(
                f"target_parameters must be empty, got {parameters}. Experts have no adapters here: use apply_lora. If "
                "you have given none, PEFT has made them of names in target_modules that mean experts: leave these out."
            )
        for name in ("trainable_token_indices", "token_indices", "ensure_weight_tying"):
            given = getattr(config, name, None)
            if given and self.causal_lm.config.tie_word_embeddings:
                raise ValueError(
                    f"{name} must be empty in a model that ties the head to the embedding, got {given}. Leave it out; "
                    "modules_to_save trains copies of either."
                )
        leaves = [node._modules[name] for node in self.modules() if isinstance(node, HFModules) for name in node.owners]
        if self.skipped and not config.inference_mode and not any(type(leaf) is nn.Linear for leaf in leaves):
            names = ", ".join(sorted(self.skipped))
            warnings.warn(
                f"{type(self.causal_lm).__name__}: all linear layers have adapters except {names}.", stacklevel=2
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        known = {prefix + name for name in self.state_dict(keep_vars=True)}
        odd = [name for name in state_dict if name.startswith(prefix) and name not in known]
        if odd:
            raise ValueError(
                f"load_state_dict: tensors must belong to adapted modules of {type(self.causal_lm).__name__}, got "
                f"{len(odd)} others: {', '.join(odd[:3])}. Experts, routers and the head have no adapters."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def config(self) -> Any:
        """The model's configuration with two names more that PEFT reads: ``model_type`` and ``from_pretrained``."""
        config = self.inner.config
        if hasattr(config, "from_pretrained"):
            return config
        copied: Any = object.__new__(_peft_config_class(type(config), format_of(type(self.causal_lm)).model_type))
        copied.__dict__.update(vars(config))
        return copied

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The model's forward. Arguments that are None, of which PEFT passes many, are left out."""
        self._check_configs(vars(self).get("peft_config", {}))
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs |= {"labels": labels, "position_ids": position_ids}
        return self.inner(**{name: value for name, value in inputs.items() if value is not None})

    def enable_input_require_grads(self) -> None:
        """Nothing: see ``is_gradient_checkpointing``. TRL calls it."""

    def get_output_embeddings(self) -> nn.Module:
        """The head, which PEFT saves with the embedding where the vocabulary has changed."""
        return self.causal_lm.lm_head

    def prepare_inputs_for_generation(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        """The arguments of the forward for the next tokens; this package's own ``generate`` does not call it."""
        prepare = getattr(type(self.inner), "prepare_inputs_for_generation", None)
        made: dict[str, Any] = {"input_ids": input_ids, **inputs}
        return made if prepare is None else prepare(self.inner, **made)  # that of the object may be PEFT's

    def train(self, mode: bool = True) -> "UnpackedModel":
        """Set the mode of all modules of the model."""
        self.inner.train(mode)
        super().train(mode)
        return self

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Write a Hugging Face checkpoint by the model's own ``save_pretrained``.

        Raises:
            ValueError: there are adapters.
        """
        with self._packed() as model:
            model.save_pretrained(folder, **options)

    def pack(self) -> Any:
        """Pack the projections again and return the model that was unpacked, with all its fused ops.

        This module is empty afterwards. Parameters that PEFT has frozen stay frozen.

        Raises:
            ValueError: there are adapters.
        """
        with self._packed(keep=True) as model:
            return model

    @contextmanager
    def _packed(self, *, keep: bool = False) -> Iterator[Any]:
        """The model with projections packed in host memory, inside; with ``keep`` on its device and for good."""
        model = self.causal_lm
        odd = sorted({name for name, _ in self.named_parameters(remove_duplicate=False)} ^ self.names)
        if odd:
            raise ValueError(
                f"{type(model).__name__}: must have no adapters to be packed or saved, got {', '.join(odd[:3])}. Merge "
                "them, or remove them: model = model.merge_and_unload(), or model.unload()."
            )
        if keep:
            self._parameters.clear()
            self._modules.clear()  # each part is freed as soon as it is packed
        config, head, parts = model.config, cast(Any, model.lm_head), {}
        if config.tie_word_embeddings and head.weight is not model.embed_tokens.weight:  # by modules_to_save
            model.config = dataclasses.replace(config, tie_word_embeddings=False)
        try:
            for path in [path for path, each in model.named_modules() if isinstance(each, UnpackedLinear)]:
                part: Any = model.get_submodule(path)
                packed = part.packed()
                if not keep:
                    parts[path], packed = part, packed.cpu()
                model.set_submodule(path, packed)
            if isinstance(head, UnpackedLMHead):
                model.lm_head = _converted(head, LigerLMHead)
            yield self.inner
        finally:
            if not keep:
                model.config, model.lm_head = config, head
                for path, part in parts.items():
                    model.set_submodule(path, part)


def _like(parameter: Tensor, values: Tensor) -> nn.Parameter:
    """A new parameter that is trained if ``parameter`` is."""
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), parameter.requires_grad)


def _converted(module: nn.Module, kind: type[nn.Module]) -> Any:
    """A module of another class with the same attributes and parameters."""
    converted = kind.__new__(kind)
    converted.__dict__ = {**module.__dict__, "_parameters": dict(module._parameters)}
    return converted


@functools.cache
def _peft_config_class(config_class: type, model_type: str) -> type:
    names = {"model_type": model_type, "from_pretrained": staticmethod(_stored_vocabulary)}
    return type(config_class.__name__, (config_class,), names)


def _stored_vocabulary(base: str) -> SimpleNamespace:
    """``vocab_size`` of a folder or a repository of the hub, with which PEFT compares the model's when it saves."""
    file = Path(base) / CONFIG
    keys = read_json(file if file.is_file() else Path(hf_hub_download(base, CONFIG)))
    return SimpleNamespace(vocab_size=keys.get("text_config", keys)["vocab_size"])
