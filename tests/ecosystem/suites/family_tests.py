"""transformers' tests of models, for the classes of `liger_models.hf`. This file is copied beside them and run there.

The families are those of the variable LIGER_FAMILIES; sizes are those of this package's own tests.
"""

import copy
import json
import os
import unittest
from pathlib import Path
from typing import Any

import torch

from liger_models.hf.auto import classifier_class, model_class

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin

FIXTURES = Path(os.environ["LIGER_FIXTURES"])


def sizes_of(family: str) -> dict[str, Any]:
    """The first of the family's tiny configurations."""
    file = json.loads((FIXTURES / family / "tiny.json").read_text())
    changes = next(iter(file["variants"].values()))
    parts = {key: {**file["base"][key], **value} for key, value in changes.items() if key.endswith("_config")}
    return {**file["base"], **changes, **parts}


class Tester:
    """What the mixins ask a family: a configuration, and a batch."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self, family: str) -> None:
        self.config = model_class(family).config_class(**{"pad_token_id": 0, **sizes_of(family)})
        text = self.config.get_text_config()
        if vars(text).get("head_dim", 0) is None:  # the tests of caches read it
            text.head_dim = text.hidden_size // text.num_attention_heads
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            setattr(self, name, getattr(text, name))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return copy.deepcopy(self.config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def get_config(self) -> Any:
        return copy.deepcopy(self.config)


class Family(ModelTesterMixin, GenerationTesterMixin):
    """The tests of a family."""

    family: str
    has_attentions = False
    """Attention weights are never formed."""

    def setUp(self) -> None:
        self.model_tester = Tester(self.family)

    @property
    def all_model_classes(self) -> tuple[type, ...]:
        return tuple(filter(None, (model_class(self.family), classifier_class(self.family))))


for family in os.environ["LIGER_FAMILIES"].split():
    globals()[f"Test_{family}"] = type(f"Test_{family}", (Family, unittest.TestCase), {"family": family})
del Family
