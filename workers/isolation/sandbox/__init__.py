"""The other side of `workers.isolation.sandbox.runner`: what a program's first process does to itself before the
program starts.

It runs in a small interpreter of its own and imports the standard library alone.
"""
