"""Ranks that share GPU memory, suspended and resumed: what `make demo` shows."""
