"""How many tokens of a task's columns count."""

from __future__ import annotations

import torch

from distflow.data.batch import Ragged
from workers.execution import _distinct_tokens


def test_a_prompt_that_neighbours_share_is_read_once() -> None:
    rows = [[1, 2], [1, 2], [1, 3], [1, 3, 4], [1, 3, 4], [1, 2], [], [], [5], [5]]
    prompts = Ragged(torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows]))
    assert _distinct_tokens(prompts) == 2 + 2 + 3 + 2 + 1
    assert _distinct_tokens(Ragged(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))) == 0
