"""The data folders, read and validated into typed, frozen objects."""
