"""`python -m gpususpend` is the command nvsnap-gpu-suspend."""

from gpususpend.start import main

main()
