"""Fails when it is imported."""

LIMITS = {}
LIMIT = LIMITS["rows"]
