"""A tokenizer for models with random weights, for libraries that take nothing but texts."""

from typing import Any

SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")
"""Words 0 to 3. No other word contains one of them: a tokenizer finds special words inside of others, too."""


def words_tokenizer(vocabulary: int) -> Any:
    """A tokenizer of transformers with the words t4, t5, ..., whose ids are these numbers, after `SPECIAL`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"t{index}" for index in range(len(SPECIAL), vocabulary))]
    bos, eos, padding, unknown = SPECIAL
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=padding, unk_token=unknown
    )
