"""Scenarios with the real command line tool. They run on simcuda too, except where a test says that it needs a GPU."""
