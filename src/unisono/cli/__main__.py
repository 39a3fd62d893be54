"""`python -m unisono.cli`: the same as the console script, also for `torchrun -m unisono.cli`."""

from unisono.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
