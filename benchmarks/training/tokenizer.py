"""A tokenizer for models with random weights, for libraries that take nothing but texts."""

from typing import Any


def words_tokenizer(vocabulary: int) -> Any:
    """A tokenizer of transformers with the words t0, t1, ..., whose ids are these numbers; t0 to t3 are special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocabulary)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t0", eos_token="t1", pad_token="t2", unk_token="t3"
    )
