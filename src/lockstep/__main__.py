"""`python -m lockstep`, which is what `./lockstep` calls."""

from .cli import main

main()
