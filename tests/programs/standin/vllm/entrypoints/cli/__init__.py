"""Where a server of vLLM would be found: a stand-in of a few hundred lines, for the simulated driver."""
