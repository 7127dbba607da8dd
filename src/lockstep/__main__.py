"""`python -m lockstep`, which is what `./lockstep` calls."""

from .commands.cli import main

if __name__ == "__main__":  # and not in a process that `multiprocessing` starts
    main()
