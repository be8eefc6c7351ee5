"""Inside a running training: the step cell, sensors, actuators, the callback and the loop."""
