"""A tokenizer for models with random weights. Libraries that only take texts need it."""

from typing import Any

SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")
"""Words with the ids 0 to 3. No other word contains them, because a tokenizer also finds special words inside words."""


def words_tokenizer(vocabulary: int) -> Any:
    """A transformers tokenizer with `SPECIAL` and the words t4, t5, .... The number in a word is the word's id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"t{index}" for index in range(len(SPECIAL), vocabulary))]
    bos, eos, padding, unknown = SPECIAL
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=padding, unk_token=unknown
    )
