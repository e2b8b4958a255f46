"""Lies here so that tests of every folder can import this one's helpers: `strategies` and `formulas`."""
