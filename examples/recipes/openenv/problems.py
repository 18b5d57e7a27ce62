"""The problems that server and data share: three or four statements, and a question about one of them."""

import reasoning_gym

PROBLEMS = reasoning_gym.create_dataset("needle_haystack", seed=3, size=4200, min_num_statements=3,
                                        max_num_statements=4)
HELD_OUT = 200
