"""From a DAG, a run and a cluster to a plan. Pure functions: no torch, no clock, no files."""

from planners.docking import through_dock
from planners.placed import obeyed
from planners.serialize import plan

__all__ = ["obeyed", "plan", "through_dock"]
