"""Files that are replaced as a whole."""

import pytest

from liger_models.common.replacing import replacing


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "file.json"
    for text in ("old", "new"):
        with replacing(path) as new:
            new.write_text(text)
            assert new.parent == tmp_path
            assert path.exists() == (text == "new")
        assert path.read_text() == text
    assert [*tmp_path.iterdir()] == [path]


def test_a_failed_block_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(path) as new:
        new.write_text("half \ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]
