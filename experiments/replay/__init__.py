"""What `replay` says about public training logs whose story is known."""
