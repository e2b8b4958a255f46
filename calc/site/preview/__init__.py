"""The live preview."""
