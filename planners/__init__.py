"""Plans a run from a DAG, a run file and a cluster. Pure functions: no torch, no clock, no files."""

from planners.planner import plan
from planners.transfers import through_dock

__all__ = ["plan", "through_dock"]
