"""Engines: the way one role's model lies on its GPUs, and what it keeps, gathers and frees at each instant."""
