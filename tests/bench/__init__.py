"""``make bench``: the only place with limits of time. `shim`: what the shim costs; `store`: how fast the store is."""
