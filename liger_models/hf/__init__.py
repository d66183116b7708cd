"""The models of this package as models of transformers, for everything that takes these: Trainer, TRL, PEFT, pipelines.

Needs the extra ``hf``. Each model type has a class with the name of the class in transformers, such as
``liger_models.hf.LlamaForCausalLM``.
"""

from typing import TYPE_CHECKING, Any

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.hf.auto import register as register
    from liger_models.hf.auto import registered as registered
    from liger_models.hf.auto import unregister as unregister
    from liger_models.hf.auto import wrap as wrap
    from liger_models.hf.cache import LigerCache as LigerCache
    from liger_models.hf.classification import LigerForSequenceClassification as LigerForSequenceClassification
    from liger_models.hf.model import LigerForCausalLM as LigerForCausalLM

    def __getattr__(name: str) -> Any: ...

else:
    _get, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "cache": ["LigerCache"],
            "classification": ["LigerForSequenceClassification"],
            "model": ["LigerForCausalLM"],
            "auto": ["register", "registered", "unregister", "wrap"],
        },
    )

    def __getattr__(name: str) -> Any:
        ends = ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification")
        if name in __all__ or not name.endswith(ends):
            return _get(name)
        from liger_models.hf.auto import find_class

        return find_class(name)
