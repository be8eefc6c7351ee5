"""Reference workload: a byte-level GPT on the Python standard library's own source."""
