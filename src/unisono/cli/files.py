"""What commands that write files share."""

from pathlib import Path

from unisono.errors import UsageError

__all__ = ["check_writable"]


def check_writable(path: Path) -> None:
    """Raise UsageError for a place where no file can be written, before any time is spent on what goes into it."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory, expected a file name")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: the directory {path.parent} does not exist")
    try:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
