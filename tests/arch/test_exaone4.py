"""EXAONE 4's pattern as a text, which transformers 5 reads only beside ``layer_types``."""

import pytest

from liger_models import Exaone4Config


def test_the_pattern_repeats_and_the_last_layer_has_no_window():
    config = Exaone4Config(num_hidden_layers=7, sliding_window=9, sliding_window_pattern="LLLG")
    assert [config.window(layer) for layer in range(7)] == [9, 9, 9, None, 9, 9, None]
    assert [config.rotates(layer) for layer in range(7)] == [True, True, True, False, True, True, False]


def test_without_a_window_every_layer_rotates():
    config = Exaone4Config(num_hidden_layers=4, sliding_window=None, sliding_window_pattern=0)
    assert all(config.window(layer) is None and config.rotates(layer) for layer in range(4))


@pytest.mark.parametrize("pattern", ["", "LLX"])
def test_other_letters_are_refused(pattern):
    with pytest.raises(
        ValueError, match=f"sliding_window_pattern must be a number or a text of L and G, got {pattern!r}"
    ):
        Exaone4Config(sliding_window_pattern=pattern)
