"""Every config of a study measured, the best ones again: what a search is held to."""
