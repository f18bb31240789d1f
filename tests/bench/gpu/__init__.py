"""How fast suspend and resume are on GPUs, and what the shim costs a program that runs: `python -m tests.bench.gpu`."""
