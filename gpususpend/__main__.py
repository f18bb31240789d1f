"""`python -m gpususpend` is the command nvsnap-gpu-suspend."""

from gpususpend.cli import main

main()
