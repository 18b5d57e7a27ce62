"""What rank 0 refuses of a call before any other rank has heard of it."""

from types import SimpleNamespace

import pytest

from workers.endpoint.messages import RequestRefused
from workers.training_api.calls import TrainingCalls
from workers.training_api.requests import CALLS

ROW = {"prompt": [1, 2], "response": [3]}


@pytest.fixture
def calls():
    made = TrainingCalls.__new__(TrainingCalls)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=8))
    actor = SimpleNamespace(head="lm", tokenizer=range(10), config=config, rollout=object(), settings=SimpleNamespace(
        generation=SimpleNamespace(max_new_tokens=4)), engine=SimpleNamespace(accumulates=False))
    made.ctx = SimpleNamespace(roles={"actor": actor, "critic": SimpleNamespace(head="value")})
    made.name, made.role, made.passes, made.sampled, made.session = "actor", actor, 0, 0, ""
    return made


def checked(calls, name, **arguments):
    request = CALLS[name].model_validate({"id": "a", "attempt": "b", "step": 0, **arguments})
    return calls._checked(SimpleNamespace(name=name, request=request))


def refusal(calls, name, **arguments):
    with pytest.raises(RequestRefused) as error:
        checked(calls, name, **arguments)
    assert 400 <= error.value.status < 500
    return str(error.value)


def test_a_role_without_a_vocabulary_gives_no_logprobs(calls):
    assert "role `critic` has a value head" in refusal(calls, "forward", data=[ROW], role="critic")
    assert checked(calls, "forward", data=[ROW])


def test_a_gradient_is_not_mixed_with_another_clients(calls):
    assert checked(calls, "forward_backward", data=[ROW], loss_fn="cross_entropy", session="first")
    calls.passes, calls.role.engine.accumulates = 1, True
    for name, more in (("forward_backward", {"data": [ROW], "loss_fn": "cross_entropy"}), ("optim_step", {})):
        assert "another client is not applied: discard it with  zero_grad" in refusal(calls, name, session="b", **more)
        assert checked(calls, name, session="first", **more)
    assert checked(calls, "zero_grad", session="b") == []


def test_an_engine_that_would_lose_a_gradient_does_not_sample(calls):
    assert checked(calls, "sample", prompts=[[1]], sampled=6)[-1] == 6
    calls.passes = 1
    assert "this engine loses it where it samples" in refusal(calls, "sample", prompts=[[1]])
    calls.role.engine.accumulates = True
    assert checked(calls, "sample", prompts=[[1]])


def test_numbers_without_effect_are_refused(calls):
    row = {**ROW, "advantages": 1.0}
    assert "`data[0].advantages` has no effect" in refusal(calls, "forward_backward", data=[row],
                                                           loss_fn="cross_entropy")
