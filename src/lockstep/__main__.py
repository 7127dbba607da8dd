"""`python -m lockstep`, which is what `./lockstep` calls."""

from .commands.cli import main

main()
