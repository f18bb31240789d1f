"""Tests of the package chunkstore, on real files; faults come from a `System` that fails when it is told to."""
