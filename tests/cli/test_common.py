"""What commands that write files share."""

from pathlib import Path

import pytest

from unisono.cli.common import check_writable
from unisono.errors import UsageError


def test_a_place_for_a_file_is_tried_first_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    check_writable(path, "the plot")
    assert not path.exists()
    path.write_bytes(b"an older curve")
    check_writable(path, "the plot")
    assert path.read_bytes() == b"an older curve"
    for bad, words in [(tmp_path, "it is a directory"), (tmp_path / "none" / "curve.png", "does not exist")]:
        with pytest.raises(UsageError, match=words):
            check_writable(bad, "the plot")
