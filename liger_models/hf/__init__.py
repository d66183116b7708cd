"""The models of this package with transformers' interface, for Trainer, TRL, PEFT, pipelines and other tools.

This subpackage needs the package's extra ``hf``. Each model type has a class with the same name as in transformers,
such as ``liger_models.hf.LlamaForCausalLM``.
"""

from typing import Any

from liger_models.common.lazy import lazy_exports

_get, __dir__, __all__ = lazy_exports(__name__, __file__)


def __getattr__(name: str) -> Any:
    ends = ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification")
    if name in __all__ or not name.endswith(ends):
        return _get(name)
    from liger_models.hf.auto import find_class

    return find_class(name)
