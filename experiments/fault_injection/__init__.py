"""Real faults, guarded against unguarded."""
