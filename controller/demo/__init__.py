"""The demo: both loops on the bundled workload."""
