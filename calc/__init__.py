"""Headroom's arithmetic: every number that the guide publishes is made here, from the catalogs, by tested functions."""

__version__ = "0.1.0"
