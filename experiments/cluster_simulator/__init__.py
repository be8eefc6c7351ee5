"""Clusters that exist only as formulas, with effects that no cost model knows."""
