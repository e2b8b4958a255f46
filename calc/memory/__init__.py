"""Memory: one file per component; each function returns a line with its formula and the values put in."""
