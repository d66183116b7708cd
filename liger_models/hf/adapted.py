"""Makes models compatible with PEFT. While a model has PEFT's adapters, its modules have transformers' names."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from liger_models.adapters.unpacked import UnpackedModel, unpack_projections

STEPS = ("_pre_injection_hook", "inject_adapter", "_post_injection_hook")
"""The methods with which a tuner of PEFT adds an adapter, in the order of their calls."""


class Injection:
    """Watches a tuner of PEFT while it adds the first adapter to a model, and undoes its changes if it fails.

    A tuner that fails calls no method of the model. The tuner's methods `STEPS` are therefore wrapped until the adapter
    is added.

    Args:
        model: the model, with unpacked projections.
        tuner: the tuner. Other objects are not watched.
    """

    def __init__(self, model: Any, tuner: Any) -> None:
        self.model = model
        self.trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self.attributes: dict[str, Any] = vars(tuner) if hasattr(type(tuner), "inject_adapter") else {}
        if self.attributes:
            self.attributes |= {name: self._watched(getattr(tuner, name)) for name in STEPS if hasattr(tuner, name)}

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``step`` and, if it fails, restores the model."""

        @functools.wraps(step)
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                return step(*arguments, **options)
            except BaseException:
                self.model._undo_injection()
                raise

        return run

    def end(self) -> None:
        """Stop watching the tuner."""
        for name in STEPS:
            self.attributes.pop(name, None)

    def remove_wrappers(self) -> None:
        """Put the model's own modules in the place of PEFT's modules, and train the same parameters as before."""
        _unwrap_children(self.model)
        for parameter, requires_grad in self.trained:
            parameter.requires_grad_(requires_grad)
        self.trained.clear()  # packing frees the memory of the parameters one by one


def _unwrap_children(module: nn.Module) -> None:
    for name, child in [*module.named_children()]:
        # A layer with an adapter holds its base layer, and a module of `modules_to_save` the original module.
        own: Any = child
        while (inner := getattr(own, "base_layer", getattr(own, "original_module", None))) is not None:
            own = inner
        if own is not child:
            setattr(module, name, own)
        _unwrap_children(own)


class Adaptable:
    """Mixin for a model whose attribute ``model`` is its body, the model without a head.

    PEFT adapts the modules of a second module tree, in which the packed projections are unpacked into one layer per
    matrix; see `unpack_projections`. Before PEFT looks for modules, the submodules of this tree replace the submodules
    of the model and of its body. After PEFT has removed its adapters, or if PEFT fails to add the first one, the
    projections are packed again.
    """

    model: Any
    _modules: Any

    @property
    def tree(self) -> UnpackedModel | None:
        """The tree of modules that PEFT adapts; None while the projections are packed."""
        tree: UnpackedModel | None = vars(self).get("peft_tree")
        return tree

    @property
    def peft_config(self) -> Any:
        """Maps adapter names to PEFT configurations.

        PEFT reads this property before it looks for modules to replace. The projections are therefore unpacked when
        PEFT reads the property.

        Raises:
            AttributeError: the model has no adapters.
        """
        caller = sys._getframe(1)
        if self.tree is None and caller.f_globals.get("__name__", "").startswith("peft.tuners."):
            self._unpack()
            vars(self)["injection"] = Injection(self, caller.f_locals.get("self"))
        # Read `adapter_configs`, because the tree's property `peft_config` would look up a missing value in this model
        # and thus call this property again.
        configs = None if self.tree is None else self.tree.adapter_configs
        if configs is None:
            raise AttributeError(f"{type(self).__name__} has no adapters of PEFT.")
        return configs

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        assert self.tree is not None
        try:
            self.tree.peft_config = configs
        except BaseException:
            self._undo_injection()
            raise
        injection = vars(self).pop("injection", None)
        if injection is not None:
            injection.end()

    @peft_config.deleter
    def peft_config(self) -> None:
        if self.tree is not None:
            del self.tree.peft_config
            if self.tree.is_plain:  # transformers' delete_adapter leaves empty wrappers
                self._pack()

    def _unpack(self) -> None:
        """Replace the submodules of the model and of its body by the tree's submodules."""
        model: Any = self
        tree, body = unpack_projections(model), self.model
        node = tree.get_submodule("model")
        vars(self)["packed_modules"] = self._modules, body._modules, body._parameters
        vars(self)["peft_tree"], vars(body)["decoder"] = tree, body.decoder
        # The body shares the dicts of the tree's node, so modules that PEFT adds to the body are also in the tree.
        vars(body)["_modules"], vars(body)["_parameters"] = node._modules, node._parameters
        vars(self)["_modules"] = {**tree._modules, "model": body}

    def _pack(self) -> None:
        """Undo `_unpack`. The model must have no adapters."""
        tree, body = self.tree, self.model
        assert tree is not None
        own, modules, parameters = vars(self).pop("packed_modules")
        own |= {name: self._modules[name] for name in own if name != "model"}
        tree.pack()
        del vars(self)["peft_tree"], vars(body)["decoder"]
        vars(body)["_modules"], vars(body)["_parameters"] = modules, parameters
        vars(self)["_modules"] = own

    def _undo_injection(self) -> None:
        """Remove what PEFT has added of the first adapter, and pack the projections again."""
        injection, tree = vars(self).pop("injection", None), self.tree
        if injection is None or tree is None:
            return
        injection.end()
        injection.remove_wrappers()
        self._hf_peft_config_loaded = False  # set by transformers' add_adapter
        tree.adapter_configs = None
        if tree.is_plain:
            self._pack()

    def __setattr__(self, name: str, value: Any) -> None:
        if self.tree is not None and name in self._modules and name != "model":
            # PEFT has replaced a module that is not part of the body.
            setattr(self.tree, name, value)
            self._modules[name] = value
            self.tree.sync_leaves()
        else:
            super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.tree is not None:
            self.tree.check_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters as `Checkpoint.load_state_dict` does. While PEFT adapts the model (see `tree`), the names of
        a Hugging Face checkpoint are not accepted, only the names of `state_dict`."""
        if self.tree is not None:
            model: Any = self
            return nn.Module.load_state_dict(model, state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save the model with `Checkpoint.save_pretrained`, unless PEFT must save its adapters.

        Raises:
            ValueError: the model has adapters that PEFT must save.
        """
        if self.tree is not None and not getattr(self, "_hf_peft_config_loaded", False):
            self.tree._check_plain()
            self._pack()
        super().save_pretrained(save_directory, *args, **options)  # type: ignore[misc]
