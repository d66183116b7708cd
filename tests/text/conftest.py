"""Folders with a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .folders import KINDS, SPECIAL


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write tokenizer.json and tokenizer_config.json."""

    def make(kind: str = "byte_level", **config: Any) -> Path:
        KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make
