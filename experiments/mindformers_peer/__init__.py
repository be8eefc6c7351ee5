"""mindtune inside MindFormers' own trainer, on a CPU: what it rescues, and what it costs there."""
