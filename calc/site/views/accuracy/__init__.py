"""Tables of errors and of what was measured."""
