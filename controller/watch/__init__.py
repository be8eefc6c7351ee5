"""A live view of a run or a study, from its files alone; it disturbs nobody who writes them."""
