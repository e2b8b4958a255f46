"""Tables of what fits where."""
