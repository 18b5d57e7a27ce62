"""What vLLM's loader reads of tensors, recorded without vLLM."""

import pytest
import torch

from workers.engines.vllm.engine import ReadRecorder


@pytest.mark.parametrize(("view", "box"), [
    (lambda whole: whole[1:3], ([1, 0], [2, 6])), (lambda whole: whole[:, 2:4], ([0, 2], [4, 2])),
    (lambda whole: whole[1:3].t(), ([1, 0], [2, 6])), (lambda whole: whole[1:2].view(torch.int16), ([0, 0], [4, 6]))])
def test_a_recorder_notes_what_is_read_or_more(view, box):
    """A view with elements of another width counts as all."""
    recorder, whole = ReadRecorder(), torch.zeros(4, 6)
    recorder.watch("weight", whole)
    with recorder:
        view(whole).clone()
    assert recorder.boxes == {"weight": [box]}
