"""Engines: how one role's model lives on its GPUs, what it keeps, gathers and frees at each moment."""
