"""MindFormers: its YAML as a study, our callback in its trainer, its YAML as the result."""
