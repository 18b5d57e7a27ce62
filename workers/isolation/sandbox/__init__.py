"""Sandbox for untrusted programs. `runner` is the entrance; all else runs in children with the standard library
alone."""
