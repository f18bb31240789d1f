"""One suite of questions to the driver, asked on the simulated driver, on a real one, and through the shim.

`python -m tests.conformance --driver sim|real [--shim LIB] --out FILE` writes what was seen;
`python -m tests.conformance.compare A B` shows where two such files, or one and `expected.json`, disagree.
"""
