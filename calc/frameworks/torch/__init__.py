"""Plain PyTorch, and the scripts and trainers that are written on it."""
