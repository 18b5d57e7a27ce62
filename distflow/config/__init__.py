"""The files that users write (DAG, run, cluster), loaded and checked with locations. Imports no torch."""
