"""The guide's own text: pages as they are written, and how they are read."""
