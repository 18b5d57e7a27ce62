"""The problems that server and data share: sums of three terms."""

import reasoning_gym

PROBLEMS = reasoning_gym.create_dataset("chain_sum", seed=1, size=4200, min_terms=3, max_terms=3, min_digits=1,
                                        max_digits=2)
HELD_OUT = 200
