"""How long a space takes to be enumerated, ruled and ranked."""
