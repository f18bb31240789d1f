"""Tests with the real CRIU, on processes of the simulated driver."""
