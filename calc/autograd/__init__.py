"""Layers written operation by operation: the lifetimes of their tensors, and closed forms."""
