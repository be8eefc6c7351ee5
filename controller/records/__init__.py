"""The signal table and the decision log of a run."""
