"""Planning on mixed hardware as one constrained joint optimisation (HetRL, arXiv 2512.12476).

    problem     the decisions: grouping, assignment, strategy and balance
    workload    builds the problem from a DAG, a run and a cluster
    hardware    rooflines of devices and links            cost       seconds of layouts and of an iteration
    layouts     the best layout of a task on a subset     search     the hybrid search      exact   the integer program
    runnable    the best placement that ranks can run     explain    what bounds a placement
    planned_run a placement as a run

Pure as the rest of `planners`, but for numpy, and scipy where an integer program is solved.
"""
