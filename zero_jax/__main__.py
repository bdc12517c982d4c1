"""`python -m zero_jax` is `zero-jax`."""

from .cli import main

main()
