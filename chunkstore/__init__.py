"""A store of content-addressed chunks on disk.

Empty for now: the name is reserved, and the package installed, for the store that stage 3 brings. It will own the
store's format, direct I/O, hashing, deduplication, cache and repair, and must not know CUDA, processes or the shim.
"""
