"""Reports of a run and of a study."""
