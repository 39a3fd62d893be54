"""What commands that write files share."""

from pathlib import Path

from unisono.errors import UsageError

__all__ = ["check_writable"]


def check_writable(path: Path, what: str = "") -> None:
    """Raise UsageError for a place where no file can be written, before any time is spent on what goes into it.

    ``what`` names the file in the message: ``the plot``.
    """
    named = f"{what} {path}".lstrip()
    if path.is_dir():
        raise UsageError(f"cannot write {named}: it is a directory, expected a file name")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {named}: the directory {path.parent} does not exist")
    try:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {named}: {error.strerror}") from None
