"""Ranks that share GPU memory, suspended and resumed: what ``make demo`` shows.

The demo is a user of gpushare like any other: its ranks are processes with the shim preloaded, and it suspends them
with the real command. It must know nothing of the supervisor's modules or of the shim.
"""
