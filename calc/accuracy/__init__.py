"""Estimates beside what was measured, and the constants that follow from the records."""
