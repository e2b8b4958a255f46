"""The macros of pages, and what surrounds their results."""
