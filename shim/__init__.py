"""Sources of ``libnvsnap_gpushare.so`` and the scripts that build it. Not installed: only the library is."""
