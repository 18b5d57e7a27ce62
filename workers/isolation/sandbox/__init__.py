"""Sandbox for untrusted programs. `runner` is the entrance; all else runs in child processes of their own.

Child processes import the standard library alone.
"""
