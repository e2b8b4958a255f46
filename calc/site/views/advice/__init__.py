"""Tables of recommendations."""
