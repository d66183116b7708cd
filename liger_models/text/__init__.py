"""Text in and out of a model: tokenizers and chat templates."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.text.chat import answer_mask as answer_mask
    from liger_models.text.tokenizer import ModelInputs as ModelInputs
    from liger_models.text.tokenizer import Tokenizer as Tokenizer
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, {"chat": ["answer_mask"], "tokenizer": ["ModelInputs", "Tokenizer"]}
    )
