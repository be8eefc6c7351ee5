"""The inner brain: pure decisions within one run."""
