"""How far the cost model is from what others measured and published."""
