"""PyTorch's caching allocator, event by event."""
