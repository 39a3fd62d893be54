import math
import os
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.train.text import MAX_BYTES, Corpus, load_corpus


def test_the_default_text_is_the_language_reference_of_python() -> None:
    corpus = load_corpus(None, context=96)
    assert len(corpus.training) + len(corpus.held_out) > 300_000
    assert len(corpus.held_out) == pytest.approx(len(corpus.training) / 9, rel=0.01)
    assert b'The "if" statement' in corpus.training


def test_a_file_is_split_into_front_and_end(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(250)) * 4)
    corpus = load_corpus(path, context=8)
    assert corpus.name == "text.txt"
    assert corpus.training + corpus.held_out == path.read_bytes()
    assert len(corpus.held_out) == 100


def test_at_most_64_mib_are_read(tmp_path: Path) -> None:
    path = tmp_path / "long.bin"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 4096)
    corpus = load_corpus(path, context=8)
    assert len(corpus.training) + len(corpus.held_out) == MAX_BYTES


def test_byte_frequencies_are_priced_as_by_hand() -> None:
    corpus = Corpus("tiny", training=b"aaab", held_out=b"abb")
    a, b = (3 + 1) / (4 + 256), (1 + 1) / (4 + 256)
    assert corpus.unigram_entropy() == pytest.approx(-(math.log(a) + 2 * math.log(b)) / 3)


def test_bytes_never_seen_in_training_have_a_finite_price() -> None:
    assert math.isfinite(Corpus("tiny", training=b"a" * 100, held_out=b"z").unigram_entropy())


def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    short = tmp_path / "short.txt"
    short.write_bytes(b"too short")
    for path, words in [
        (tmp_path / "missing", "No such file"),
        (tmp_path, "it is no regular file"),
        (fifo, "it is no regular file"),
        (Path("/dev/zero"), "it is no regular file"),
        (short, "the text short.txt has 9 bytes, expected 360 or more for a context of 8"),
    ]:
        with pytest.raises(UsageError, match=words):
            load_corpus(path, context=8)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_text_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_bytes(b"x" * 1000)
    path.chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        load_corpus(path, context=8)
