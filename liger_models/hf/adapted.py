"""Makes models compatible with PEFT. While a model has PEFT's adapters, its modules have transformers' names."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from liger_models.adapters.unpacked import UnpackedModel, unpack_projections


class Adaptable:
    """Mixin for a model whose attribute ``model`` is its body, the model without a head.

    PEFT adapts the modules of a second module tree, in which the packed projections are unpacked into one layer per
    matrix; see `unpack_projections`. Before PEFT looks for modules, the submodules of this tree replace the submodules
    of the model and of its body. After PEFT has removed its adapters, the projections are packed again.
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
        if self.tree is None and sys._getframe(1).f_globals.get("__name__", "").startswith("peft.tuners."):
            self._unpack()
        # Read `adapter_configs`, because the tree's property `peft_config` would look up a missing value in this model
        # and thus call this property again.
        configs = None if self.tree is None else self.tree.adapter_configs
        if configs is None:
            raise AttributeError(f"{type(self).__name__} has no adapters of PEFT.")
        return configs

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        assert self.tree is not None
        self.tree.peft_config = configs

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
