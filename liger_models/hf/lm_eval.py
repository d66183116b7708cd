"""Support for lm-evaluation-harness: registers the model type ``liger_models``, which uses models of this package.

``python -m liger_models.hf.lm_eval`` registers the model type and runs the harness's command ``lm_eval``. In Python,
import this module to register the model type.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedConfig, StoppingCriteria, StoppingCriteriaList

from liger_models.adapters.unpacked import unpack_projections
from liger_models.hf.auto import model_class

TOKENS_PER_CHECK = 16
"""Number of new tokens between two checks of `StopTexts`, each of which decodes all answers."""


class StopTexts(StoppingCriteria):
    """Ends the generation of a batch at most `TOKENS_PER_CHECK` - 1 tokens after all answers contain a stop text.

    The harness cuts answers before their stop texts, so its results do not change. The harness's own criterion is slow:
    after each token, it decodes all answers, which takes longer than computing the token.

    Args:
        texts: the stop texts.
        tokenizer: the tokenizer that decodes the answers.
        prompt_tokens: length of the prompts, including padding.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, prompt_tokens: int) -> None:
        self.texts, self.tokenizer, self.prompt_tokens = texts, tokenizer, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        new = input_ids.shape[1] - self.prompt_tokens
        if new % TOKENS_PER_CHECK:
            return False
        answers = self.tokenizer.batch_decode(input_ids[:, self.prompt_tokens :].tolist())
        return all(any(text in answer for text in self.texts) for answer in answers)


@register_model("liger_models")
class LigerLM(HFLM):
    """Like the harness's model type ``hf``, but with a model of this package. The arguments are the same."""

    _model: Any

    def _get_backend(self, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
        self.AUTO_MODEL_CLASS = model_class(config.model_type)
        super()._get_backend(config, *args, **options)

    def _create_model(self, *args: Any, peft: str | None = None, **options: Any) -> None:
        super()._create_model(*args, **options)
        # PEFT finds the modules of an adapter under transformers' names.
        if peft:
            from peft import PeftModel

            self._model = PeftModel.from_pretrained(
                unpack_projections(self._model), peft, revision=options.get("revision")
            )

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Generate as the harness does, but detect stop texts with `StopTexts`, which is faster."""
        # If the harness searches answers for the end of the reasoning, it needs the tokens after a stop text.
        thinks = getattr(self, "think_end_token", None) is not None
        if not stop or thinks or self.mixed_precision_dtype is not None:
            answers: Tensor = super()._model_generate(context, max_length, stop, **options)
            return answers
        # A temperature of 0 is the harness's request for greedy decoding. transformers rejects this temperature.
        if options.setdefault("temperature", 0.0) == 0 and not options.get("do_sample"):
            del options["temperature"]
            options["do_sample"] = False
        criteria = StoppingCriteriaList([StopTexts(stop, self.tokenizer, context.shape[1])])
        answers = self.model.generate(
            input_ids=context, max_length=max_length, stopping_criteria=criteria,
            pad_token_id=self.tokenizer.pad_token_id, use_cache=True, **options,
        )  # fmt: skip
        return answers


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
