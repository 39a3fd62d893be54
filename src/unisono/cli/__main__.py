"""The console script; `python -m unisono.cli` is the same, also for `torchrun -m unisono.cli`."""

__all__ = ["main"]


def main() -> None:
    """Runs one command line; Ctrl-C is no traceback, not even while the commands are imported."""
    try:
        from unisono.cli import main as command

        command.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
