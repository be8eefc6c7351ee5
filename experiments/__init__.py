"""The reference workload and the experiments that measure mindtune itself."""
