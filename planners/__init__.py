"""Plans a run from a DAG, a run file and a cluster. Pure functions: no torch, no clock, no files."""

from planners.apply_plan_file import apply_plan_file
from planners.planner import plan
from planners.transfers import through_dock

__all__ = ["apply_plan_file", "plan", "through_dock"]
