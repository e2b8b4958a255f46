"""Turns estimates into pages, tables, charts and downloads. It counts no byte: every figure comes from `calc`."""
