"""The calculator, on its page and in a reader's browser."""
