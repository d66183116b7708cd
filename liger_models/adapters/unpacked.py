"""A tree of modules for PEFT. In the tree, a model's modules have the names that they have in transformers.

PEFT finds modules by name and replaces them. PEFT does not know the names of packed projections, each of which holds
several matrices. Each packed projection is therefore first split into one linear layer per matrix. The model keeps its
blocks, its attention and its loss. The tree has the following structure:

    UnpackedModel                the tree, whose leaves are modules of the model
      model.layers.0.self_attn     Node
        q_proj, k_proj, v_proj       nn.Linear, parts of UnpackedLinear in the model
        o_proj                       nn.Linear with the model's own weight, the only part of its UnpackedLinear
      model.layers.0.mlp.experts   Node with the parameters that PEFT cannot adapt

PEFT changes only the tree. `UnpackedModel.sync` copies the tree's modules into the model. `sync` runs when PEFT sets or
deletes ``peft_config``, and before every forward.
"""

import dataclasses
import functools
import os
import posixpath
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from huggingface_hub import hf_hub_download
from torch import Tensor, nn

from liger_models.adapters.lora import adaptable_layers, unsupported_linears
from liger_models.adapters.lora_layers import short_name, with_class
from liger_models.adapters.unpacked_checks import check_config
from liger_models.adapters.unpacked_linear import UnpackedLinear
from liger_models.base.causal_lm import CausalLM
from liger_models.common.device import empty_on
from liger_models.common.errors import check_values
from liger_models.convert.files import CONFIG, read_json
from liger_models.convert.format import format_of
from liger_models.convert.weight_map import Expression, Name
from liger_models.layers.layer import Layer
from liger_models.layers.linear import is_sharded
from liger_models.layers.lm_head import LigerLMHead


def unpack_projections(model: nn.Module) -> "UnpackedModel":
    """Split a model's packed projections in place, and return a tree of modules with the names used by transformers.

    Call this function before PEFT: ``get_peft_model(unpack_projections(model), config)``. Each matrix becomes a
    separate linear layer (q_proj, k_proj, v_proj, gate_proj, up_proj), so fused ops that need packed weights are not
    used.

    Args:
        model: a `CausalLM`, or a module that contains and calls a `CausalLM`. The weights are moved to the new layers,
            not copied.

    Returns:
        A module with the same forward as ``model``. Its method ``pack`` returns ``model`` with packed projections, and
        its method ``save_pretrained`` writes a Hugging Face checkpoint.

    Raises:
        ValueError: the model is sharded, has adapters, or has linear layers that are subclasses of `nn.Linear` from
            other packages.
    """
    # There must be exactly one model of this package. It must not be sharded, and must have neither adapters nor linear
    # layers that another tool has wrapped or replaced.
    where = f"unpack_projections: {type(model).__name__}"
    if any(isinstance(module, (UnpackedModel, UnpackedLinear)) for module in model.modules()):
        raise ValueError(
            f"{where} must have packed projections, got a model that is unpacked already. Use the model that the first "
            "call or pack() returned."
        )
    causal_lms = [module for module in model.modules() if isinstance(module, CausalLM)]
    if len(causal_lms) != 1:
        raise ValueError(f"{where} must be or hold one CausalLM, got {len(causal_lms)}. Load a model of this package.")
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            f"{where} must not be sharded, got sharded parameters. For several GPUs use apply_lora and apply_fsdp."
        )

    unsupported = unsupported_linears(model)
    if unsupported:
        raise ValueError(
            f"{where} must have no other linear layers than nn.Linear, got {', '.join(unsupported)}. Unpack the model "
            "before anything replaces layers."
        )
    return UnpackedModel(model, causal_lms[0])


class UnpackedLMHead(Layer):
    """A head with the same forward as `LigerLMHead`, but without the base class `nn.Linear`.

    PEFT would replace an `nn.Linear` by a layer that cannot compute the loss.
    """

    forward = LigerLMHead.forward
    operands, product, with_bias = LigerLMHead.operands, LigerLMHead.product, LigerLMHead.with_bias

    def extra_repr(self) -> str:
        """Return a note that the head can't have an adapter. PEFT's error shows this note."""
        return "lm_head has the loss inside: train it with modules_to_save or liger_models.adapters.apply_lora"


class Node(nn.Module):
    """An inner module of the tree of modules that PEFT sees (see `UnpackedModel`).

    The leaves of the tree are modules of the model under other names. PEFT may replace leaves.
    """

    leaves: dict[str, tuple[nn.Module, str]]
    """Maps the name of each leaf to a pair: the leaf's parent module in the model, and its name in this parent."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = {}

    def add_leaf(self, name: str, owner: nn.Module, owner_name: str) -> None:
        """Add the submodule ``owner_name`` of ``owner`` to the tree as ``name``.

        The submodule also stays in the model.
        """
        self.leaves[name] = owner, owner_name
        setattr(self, name, getattr(owner, owner_name))

    def node(self, path: str) -> "Node":
        """Return the node at a path below this node, creating missing nodes."""
        node = self
        for name in path.split(".") if path else []:
            if name not in dict(node.named_children()):
                setattr(node, name, Node())
            node = cast(Node, node.get_submodule(name))
        return node

    def sync_leaves(self) -> None:
        """Copy the leaves, some of which PEFT may have replaced, into the model."""
        for name, module in self.named_children():
            if isinstance(module, Node):
                module.sync_leaves()
            elif name in self.leaves:
                owner, owner_name = self.leaves[name]
                if getattr(owner, owner_name) is not module:
                    setattr(owner, owner_name, module)
            else:
                layers = [f"{name}.{path}" for path in _layers_inside(module)]
                if layers:
                    raise ValueError(
                        f"{name}: modules_to_save must name single layers, got a module that holds several. Load the "
                        f"model again, which PEFT has changed, and name {', '.join(layers)}."
                    )
                raise ValueError(
                    f"{name}: PEFT must replace linear layers, norms, the embedding or the head, got another module. "
                    "Experts, routers and patch embeddings have no adapters: load the model again, which PEFT has "
                    "changed, and list other names in target_modules or modules_to_save."
                )

    def extra_repr(self) -> str:
        """Return the names of the parameters that can't have adapters. PEFT's error shows these names."""
        names = [name for name, _ in self.named_parameters(recurse=False)]
        return f"{', '.join(names)}, which cannot have adapters" if names else ""


@dataclasses.dataclass
class WrappedModel:
    """Holds the model whose modules are in the tree.

    This class is not an `nn.Module`. Otherwise, each parameter of `UnpackedModel` would have two names.
    """

    inner: nn.Module
    causal_lm: CausalLM


class UnpackedModel(Node):
    """A model whose modules have the names that they have in transformers; see `unpack_projections`.

    Missing attributes, such as ``generate``, ``set_checkpointing`` and ``tokenizer``, are looked up in the model.

    Args:
        inner: the argument of `unpack_projections`.
        causal_lm: the `CausalLM` in ``inner``, or ``inner`` itself.
    """

    is_gradient_checkpointing = False
    """False, because otherwise PEFT would make the embedding's output require a gradient, which is not needed."""
    fixed: list[str]
    """Checkpoint names of parameters that can't have adapters, such as experts, routers and patch embeddings.
    """
    skipped: set[str]
    """The last parts of the names in `fixed` that belong to linear layers or experts in transformers."""
    plain_names: set[str]
    """The names of all parameters of the tree before PEFT adds adapters."""
    said: set[str]
    """Reasons why PEFT itself computes some layers. A warning has already been issued for each of these reasons."""
    adapter_configs: dict[str, Any] | None
    """Maps adapter names to PEFT configurations; None before the first adapter and after unloading."""
    checked: set[str]
    """Names of the adapters whose configurations have been checked."""

    def __init__(self, inner: nn.Module, causal_lm: CausalLM) -> None:
        super().__init__()
        self.fixed, self.skipped, self.said = [], set(), set()
        self.adapter_configs, self.checked = None, set()
        self.input_hooks: list[Any] = []

        # Build the tree.
        self._add_causal_lm(causal_lm)
        self._add_modules_beside(inner, causal_lm)
        self.plain_names = self._parameter_names()

        # PEFT reads these attributes from the module that it adapts.
        self.name_or_path = getattr(inner, "name_or_path", None)
        embedding = causal_lm.embed_tokens
        self.embeds_by_lookup = embedding.is_lookup  # read now, because PEFT may replace the embedding
        if embedding.scale is not None:
            setattr(embedding, "embed_scale", embedding.scale)  # noqa: B010  # for adapters of the embedding

        # From here on, `__getattr__` looks up missing attributes in the model. Before each forward, hooks copy the
        # tree's modules into the model.
        self.wrapped = WrappedModel(inner, causal_lm)
        self.hooks = [module.register_forward_pre_hook(self._before_forward) for module in {inner, causal_lm}]

    @property
    def inner(self) -> Any:
        """The argument of `unpack_projections`."""
        return self.wrapped.inner

    @property
    def causal_lm(self) -> CausalLM:
        """The `CausalLM` in `inner`, or `inner` itself."""
        return self.wrapped.causal_lm

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "wrapped" not in vars(self):
                raise
            return getattr(self.inner, name)

    # Building the tree

    def _add_causal_lm(self, causal_lm: CausalLM) -> None:
        """Add a model's modules to the tree, under the names that their parameters have in the checkpoint."""
        entries = format_of(type(causal_lm)).module_map(causal_lm.config).entries
        linears, counterparts = adaptable_layers(causal_lm), _counterparts(entries)
        for path, module in [*causal_lm.named_modules()]:  # a list, because the loop replaces modules
            owner_path, _, owner_name = path.rpartition(".")
            owner = causal_lm.get_submodule(owner_path)

            # Find the expressions that compute the module's own parameters from the checkpoint's tensors.
            expressions = {}
            for name, _ in module.named_parameters(recurse=False):
                full_name = f"{path}.{name}".lstrip(".")
                expressions[name] = entries.get(full_name, Name(full_name))  # a tied head has no entry

            if _is_same_module(module, expressions, counterparts):
                if isinstance(module, LigerLMHead):
                    setattr(owner, owner_name, with_class(module, UnpackedLMHead))
                tensor = next(iter(expressions.values())).names()[0]
                self._add_leaf_at(tensor.rpartition(".")[0], owner, owner_name)
            elif path in linears:
                # Replace the projection by a linear layer for each of its matrices.
                bias = expressions.get("bias")
                unpacked = UnpackedLinear(linears[path][0], expressions["weight"], bias, self.said)
                setattr(owner, owner_name, unpacked)
                for name in expressions:
                    setattr(module, name, None)  # frees the memory
                for name in expressions["weight"].names():
                    self._add_leaf_at(name.removesuffix(".weight"), unpacked, short_name(name))
            else:  # in transformers, no module has just these parameters, so PEFT can't adapt them
                for name, expression in expressions.items():
                    self._add_fixed(module, name, expression)

    def _add_leaf_at(self, path: str, owner: nn.Module, owner_name: str) -> None:
        parent, _, name = path.rpartition(".")
        self.node(parent).add_leaf(name, owner, owner_name)

    def _add_fixed(self, module: nn.Module, name: str, expression: Expression) -> None:
        """Add a parameter that can't have adapters, so that the tree contains all parameters."""
        parameter: Any = module.get_parameter(name)
        tensors = expression.names()
        self.fixed.extend(tensor.removesuffix(".weight") for tensor in tensors)

        # `skipped` lists what users may expect "all-linear" to adapt: linear layers and the experts' matrices
        # [X, O, C]. Patch embeddings are linear layers in this package, but convolutions in the checkpoint, so they are
        # not listed.
        unpacked = expression.unpack(empty_on("meta", parameter))
        is_linear = isinstance(module, nn.Linear) and unpacked[tensors[0]].dim() == 2
        if is_linear or parameter.dim() == 3:
            self.skipped.update(short_name(tensor) for tensor in tensors if tensor.endswith(("weight", "_proj")))

        # Add the parameter at the path of its tensor. If it has several tensors, such as one per expert, find their
        # common path.
        path, _, last = tensors[0].rpartition(".")
        if len(tensors) > 1:
            path, last = posixpath.commonpath([tensor.replace(".", "/") for tensor in tensors]).replace("/", "."), name
        self.node(path).register_parameter(last, parameter)

    def _add_modules_beside(self, inner: nn.Module, causal_lm: CausalLM) -> None:
        """Add the modules outside of the `CausalLM`, such as a classification head, to the tree under their own
        names."""
        # Visit the modules that contain the `CausalLM`, from the outermost one inwards.
        for path, wrapper in inner.named_modules():
            if wrapper is causal_lm or causal_lm not in wrapper.modules():
                continue
            node = self.node(path)
            for name, module in wrapper.named_children():
                if causal_lm in module.modules():
                    continue
                if name in dict(node.named_children()):
                    full_name = f"{path}.{name}".lstrip(".")
                    raise ValueError(
                        f"unpack_projections: {type(inner).__name__} must have modules of other names beside its "
                        f"{type(causal_lm).__name__}, got {full_name}, which transformers' model has as well. Rename "
                        "it."
                    )
                node.add_leaf(name, wrapper, name)
            for name, parameter in wrapper.named_parameters(recurse=False):
                node.register_parameter(name, parameter)

    # Adapters

    @property
    def peft_config(self) -> dict[str, Any]:
        """Maps adapter names to PEFT configurations.

        PEFT sets this attribute after it has replaced modules for the first adapter, and deletes it after it has
        removed all adapters. Setting or deleting the attribute copies the tree's modules into the model.
        """
        if self.adapter_configs is None:
            raise AttributeError(f"{type(self).__name__} has no adapters.")
        return self.adapter_configs

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        self.adapter_configs, self.checked = configs, set()
        self.sync()

    @peft_config.deleter
    def peft_config(self) -> None:
        self.adapter_configs = None
        self.sync()

    def sync(self) -> None:
        """Copy the tree's modules into the model, and check the configurations of new adapters.

        Raises:
            ValueError: PEFT has replaced a module that can't have adapters in this package, or a configuration has a
                setting that PEFT would silently ignore.
        """
        # Check the configurations first, because their errors name the setting.
        for name, config in (self.adapter_configs or {}).items():
            if name not in self.checked:
                check_config(
                    config, self.inner, self.causal_lm, fixed=self.fixed, embeds_by_lookup=self.embeds_by_lookup
                )
                self._warn_of_skipped(config)
                self.checked.add(name)
        self.sync_leaves()

    def _before_forward(self, *_: Any) -> None:
        self.sync()

    _before_forward.only_prepares = True  # type: ignore[attr-defined]  # see `run_preparing_hooks`

    def _warn_of_skipped(self, config: Any) -> None:
        """If PEFT has adapted every linear layer of the tree, warn about linear layers and experts without adapters."""
        if self.skipped and not config.inference_mode and not any(type(leaf) is nn.Linear for leaf in self._leaves()):
            names = ", ".join(sorted(self.skipped))
            warnings.warn(
                f"{type(self.causal_lm).__name__}: all linear layers have adapters except {names}.", stacklevel=2
            )

    def _leaves(self) -> Iterator[nn.Module]:
        """Iterate over the leaves of the tree, some of which PEFT may have replaced."""
        for node in self.modules():
            if isinstance(node, Node):
                yield from (node.get_submodule(name) for name in node.leaves)

    def check_names(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise ValueError if the state dict has tensors for modules that the tree does not have."""
        expected = {prefix + name for name in self.state_dict(keep_vars=True)}
        unexpected = [name for name in state_dict if name.startswith(prefix) and name not in expected]
        if unexpected:
            raise ValueError(
                f"load_state_dict: tensors must belong to adapted modules of {type(self.causal_lm).__name__}, got "
                f"{len(unexpected)} others: {', '.join(unexpected[:3])}. Experts, routers and the head have no "
                "adapters."
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.check_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # The interface for PEFT, TRL and training loops

    @property
    def config(self) -> Any:
        """The configuration of the model, with the methods and the ``model_type`` that PEFT reads."""
        config = self.inner.config
        if hasattr(config, "from_pretrained"):
            return config
        config_class: Any = type(config)
        peft_class = _peft_config_class(config_class, format_of(type(self.causal_lm)).model_type)
        return peft_class(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Call the model's forward without the arguments that are None, because PEFT passes many such arguments."""
        if attention_mask is not None and attention_mask.is_floating_point() and self.inner is self.causal_lm:
            # For learned prompts, PEFT prepends ones of the default dtype to the mask.
            check_values(
                (attention_mask == attention_mask.bool()).all(),
                "forward: attention_mask must be 1 for tokens and 0 for padding, got other numbers. Pass mask > 0.",
            )
            attention_mask = attention_mask.bool()
        # Arguments that are None are not passed, because the model may not have these arguments.
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs |= {"labels": labels, "position_ids": position_ids}
        return self.inner(**{name: value for name, value in inputs.items() if value is not None})

    @property
    def generation_config(self) -> Any:
        """The model's defaults for ``generate``; None for a `CausalLM`."""
        return getattr(self.inner, "generation_config", None)

    @generation_config.setter
    def generation_config(self, value: object) -> None:
        self.inner.generation_config = value

    @property
    def loss_function(self) -> Any:
        """The loss function that is applied to the logits. Users can replace it in a model of `liger_models.hf`."""
        return self.inner.loss_function

    @loss_function.setter
    def loss_function(self, function: object) -> None:
        if self.inner is self.causal_lm:
            raise ValueError(
                f"loss_function: {type(self.inner).__name__} takes it as an argument of the forward. Pass it there."
            )
        self.inner.loss_function = function

    def get_encoder(self) -> "UnpackedModel":
        """Return the model itself. In transformers, this means that the model has no encoder."""
        return self

    def enable_input_require_grads(self) -> None:
        """Make the embedding's output require a gradient, which other tools need for reentrant checkpointing."""
        self.disable_input_require_grads()
        hook = self.get_input_embeddings().register_forward_hook(lambda *call: call[-1].requires_grad_(True))
        self.input_hooks = [hook]

    def disable_input_require_grads(self) -> None:
        """Undo `enable_input_require_grads`."""
        for hook in self.input_hooks:
            hook.remove()
        self.input_hooks = []

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, or the module that PEFT has put in its place."""
        self.sync_leaves()
        return self.causal_lm.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, which PEFT saves with the embedding if the vocabulary has changed."""
        self.sync_leaves()
        return self.causal_lm.lm_head

    @property
    def prepare_inputs_for_generation(self) -> Callable[..., dict[str, Any]]:
        """The method ``prepare_inputs_for_generation`` of the model. PEFT replaces it to add learned prompts.

        This package's ``generate`` does not call this method.
        """
        method = getattr(self.inner, "prepare_inputs_for_generation", None)
        return method or (lambda input_ids, **inputs: {"input_ids": input_ids, **inputs})

    @prepare_inputs_for_generation.setter
    def prepare_inputs_for_generation(self, method: Callable[..., dict[str, Any]]) -> None:
        config = getattr(getattr(method, "__self__", None), "active_peft_config", None)
        if self.inner is self.causal_lm and getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"generate: learned prompts need transformers' generate, got {type(self.inner).__name__}. Adapt "
                "unpack_projections(liger_models.hf.wrap(model))."
            )
        if hasattr(self.inner, "prepare_inputs_for_generation"):
            self.inner.prepare_inputs_for_generation = method

    def train(self, mode: bool = True) -> "UnpackedModel":
        """Set training or eval mode for all modules of the model."""
        self.inner.train(mode)
        super().train(mode)
        return self

    # Packing

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Write a Hugging Face checkpoint with the model's own ``save_pretrained``.

        Raises:
            ValueError: the model has adapters.
        """
        with self._packed_in_host_memory():
            self.inner.save_pretrained(folder, **options)

    def pack(self) -> Any:
        """Pack the projections again, and return the original model, which can use all fused ops.

        Afterwards, this module is empty. Parameters that PEFT has frozen stay frozen.

        Raises:
            ValueError: the model has adapters.
        """
        self._check_plain()
        self.sync()
        for hook in self.hooks:
            hook.remove()

        # Empty the tree first, so that the memory of each part is freed as soon as the part is packed.
        for name in [name for name, _ in (*self.named_children(), *self.named_parameters(recurse=False))]:
            delattr(self, name)
        model = self.causal_lm
        _untie_if_different(model)
        for path in self._unpacked_paths():
            model.set_submodule(path, cast(UnpackedLinear, model.get_submodule(path)).packed())
        if isinstance(model.lm_head, UnpackedLMHead):
            model.lm_head = with_class(model.lm_head, LigerLMHead)
        return self.inner

    @contextmanager
    def _packed_in_host_memory(self) -> Iterator[None]:
        """Context manager within which the model has packed projections, in host memory, so that it can be saved."""
        self._check_plain()
        self.sync()
        # The unpacked layers stay on the device. Only their packed copies are in host memory.
        model = self.causal_lm
        config, head = model.config, model.lm_head
        unpacked: dict[str, Any] = {path: model.get_submodule(path) for path in self._unpacked_paths()}
        _untie_if_different(model)
        try:
            for path, layer in unpacked.items():
                model.set_submodule(path, layer.packed().cpu())
            if isinstance(head, UnpackedLMHead):
                model.lm_head = with_class(head, LigerLMHead)
            yield
        finally:
            model.config, model.lm_head = config, head
            for path, layer in unpacked.items():
                model.set_submodule(path, layer)

    @property
    def is_plain(self) -> bool:
        """Whether the tree has only the model's own modules, and no modules of PEFT."""
        return self._parameter_names() == self.plain_names

    def _check_plain(self) -> None:
        """Raise ValueError if the model has adapters."""
        if not self.is_plain:
            raise ValueError(
                f"{type(self.causal_lm).__name__}: must have no adapters to be packed or saved, got "
                f"{', '.join(sorted(self._parameter_names() ^ self.plain_names)[:3])}. Merge them, or remove them: "
                "model = model.merge_and_unload(), or model.unload()."
            )

    def _parameter_names(self) -> set[str]:
        return {name for name, _ in self.named_parameters(remove_duplicate=False)}

    def _unpacked_paths(self) -> list[str]:
        return [path for path, layer in self.causal_lm.named_modules() if isinstance(layer, UnpackedLinear)]


def _layers_inside(module: nn.Module) -> list[str]:
    """Return the paths of the layers in a module that PEFT has wrapped for its option ``modules_to_save``.

    The result is empty if the module also has parameters outside of these layers.
    """
    node = getattr(module, "original_module", None)
    if not isinstance(node, Node):
        return []
    parts = dict(node.named_modules())
    nodes = {path: part for path, part in parts.items() if isinstance(part, Node)}
    return [] if any(part._parameters for part in nodes.values()) else [path for path in parts if path not in nodes]


def _counterparts(entries: Mapping[str, Expression]) -> dict[str, set[str]]:
    """Map the path of each checkpoint module to our modules that hold its parameters or its submodules' parameters."""
    counterparts: dict[str, set[str]] = {}
    for parameter, expression in entries.items():
        for tensor in expression.names():
            path, _, _ = tensor.rpartition(".")
            while path:
                counterparts.setdefault(path, set()).add(parameter.rpartition(".")[0])
                path, _, _ = path.rpartition(".")
    return counterparts


def _is_same_module(module: nn.Module, expressions: dict[str, Expression], counterparts: dict[str, set[str]]) -> bool:
    """Whether a module of our model corresponds to one module in transformers, as a norm or the embedding does.

    The result is False for all linear layers except the head. The linear layers that can have adapters are replaced by
    an `UnpackedLinear`, which can run fused ops with adapters.

    Args:
        module: the module.
        expressions: for each of the module's own parameters, the `Expression` that computes it from the checkpoint's
            tensors.
        counterparts: see `_counterparts`.
    """
    if isinstance(module, nn.Linear) and not isinstance(module, LigerLMHead):
        return False
    # The parameters must belong to one module of the checkpoint and have the same names. Neither module may have
    # other parameters.
    paths = {name.rpartition(".")[0] for expression in expressions.values() for name in expression.names()}
    unchanged = all(
        isinstance(expression, Name) and expression.name.endswith(f".{name}")
        for name, expression in expressions.items()
    )
    if len(paths) != 1 or not unchanged or any(module.children()):
        return False
    return len(counterparts.get(paths.pop(), ())) <= 1


def _untie_if_different(model: CausalLM) -> None:
    """If ``modules_to_save`` has given the head a weight of its own, untie the head, so that this weight is saved."""
    head = cast(Any, model.lm_head)
    if model.config.tie_word_embeddings and head.weight is not model.embed_tokens.weight:
        model.config = dataclasses.replace(model.config, tie_word_embeddings=False)


@functools.cache
def _peft_config_class(config_class: type, model_type: str) -> type:
    """Return a subclass of a configuration class, with the methods and the ``model_type`` that PEFT reads."""
    attributes: dict[str, Any] = {"model_type": model_type, "from_pretrained": staticmethod(_stored_vocabulary)}
    attributes["to_dict"] = lambda config: dataclasses.asdict(config) | {"model_type": model_type}
    attributes["get_text_config"] = lambda config: config
    return type(config_class.__name__, (config_class,), attributes)


def _stored_vocabulary(base: str) -> SimpleNamespace:
    """Return the ``vocab_size`` in the config.json of a folder or hub repository.

    When PEFT saves an adapter, it compares this number with the model's ``vocab_size``.
    """
    file = Path(base) / CONFIG
    keys = read_json(file if file.is_file() else Path(hf_hub_download(base, CONFIG)))
    return SimpleNamespace(vocab_size=keys.get("text_config", keys)["vocab_size"])
