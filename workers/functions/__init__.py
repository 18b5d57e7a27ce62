"""Node functions and the pure tensor mathematics that they call."""
