"""Tests of gpushare. A package, so that another `tests` on the path does not stand in the way."""
