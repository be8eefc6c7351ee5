"""Plants faults in a run on purpose: what a policy answers can be seen before it is needed.

`planted` is what a session calls; `gradients`, `rates` and `memory` carry out what is more than a
wait or another reading. Without a plan nothing of it is loaded, and no graph is another.
"""
