"""Sandbox for untrusted programs. `runner` is the entrance; all else runs in children, by the standard library."""
