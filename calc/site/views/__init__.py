"""Answers as tables."""
