"""Launching, supervising and measuring trials."""
