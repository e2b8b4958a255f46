"""Memory: one file a component; each function returns a line with its formula and the values put in."""
