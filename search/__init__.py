"""The outer brain: pure decisions between runs."""
