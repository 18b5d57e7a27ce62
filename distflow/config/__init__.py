"""The nouns: what a user writes, what a planner answers, what can be wrong. Nothing here loads torch."""
