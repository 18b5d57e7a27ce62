"""Planning on mixed hardware as one problem (HetRL, arXiv 2512.12476): grouping, assignment, strategy and balance.

`problem` says what is decided, `cost` what it takes; `hybrid` searches and `exact` proves, over the same cost model.
Pure as its neighbours, but for numpy, and scipy where an integer program is solved.
"""
