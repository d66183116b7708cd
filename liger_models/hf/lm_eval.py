"""Support for lm-evaluation-harness, in which the models of this package have the type ``liger_models``.

``python -m liger_models.hf.lm_eval`` is the harness's command ``lm_eval`` with this model type. In Python, import this
module to register the model type.
"""

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedConfig

from liger_models.adapters.unpacked import unpack_projections
from liger_models.hf.auto import model_class


@register_model("liger_models")
class LigerLM(HFLM):
    """The harness's model type ``hf``, but with a model of this package. It takes the arguments of ``hf``."""

    _model: Any

    def _get_backend(self, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        self.AUTO_MODEL_CLASS = model_class(config.model_type)
        super()._get_backend(config, *args, **options)

    def _create_model(self, *args: Any, peft: str | None = None, **options: Any) -> None:
        super()._create_model(*args, **options)
        # PEFT finds the modules of an adapter by transformers' names.
        if peft:
            from peft import PeftModel

            self._model = PeftModel.from_pretrained(
                unpack_projections(self._model), peft, revision=options.get("revision")
            )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
