"""What every engine that samples must do: the same tests for all of them, against a plain transformers model.

The bounds are of a log-probability: what an engine reports against one forward pass of transformers in the same
numbers. In bfloat16 two libraries round at different places.
"""

from __future__ import annotations

import pytest
import torch
from engines.rollouts import ENDS, LIMIT, VOCABULARY, build, tiny

from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from distflow.telemetry.metrics import Metrics, recording
from workers.engines.embedded import build_tokenizer
from workers.engines.rollout import StopStrings
from workers.engines.rounding import ROUNDING
from workers.engines.sampling import TokenLimits
from workers.rollout import PartialRollouts

BOUND = {"float32": ROUNDING[4].token, "bfloat16": ROUNDING[2].token}


def weights(model):
    return [(name, parameter.data) for name, parameter in model.named_parameters()]


def changed(model, seed: int = 1):
    """The model, after a step that one cannot miss."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def greedy_of(model, prompt, limit: int = LIMIT) -> list[int]:
    """What transformers generates itself."""
    tokens = model.generate(prompt[None], max_new_tokens=limit, do_sample=False, eos_token_id=ENDS, pad_token_id=0)[0]
    return tokens[len(prompt) :].tolist()


@torch.no_grad()
def logprobs_of(model, prompt, response, temperature: float = 1.0) -> torch.Tensor:
    """By one forward pass, without a cache."""
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def require_greedy(engine, model, prompts) -> None:
    samples = engine.generate(prompts, 1, torch.arange(len(prompts)), key=1, temperature=0.0)
    assert [row.tolist() for row in samples.tokens.rows] == [greedy_of(model, prompt) for prompt in prompts.rows]
    require_logprobs(model, prompts, samples)


def require_logprobs(model, prompts, samples, temperature: float = 1.0, dtype: str = "float32") -> None:
    each = len(samples.tokens) // len(prompts)
    for place, (response, logprobs) in enumerate(zip(samples.tokens.rows, samples.logprobs.rows)):
        expected = logprobs_of(model, prompts.rows[place // each], response, temperature)
        assert torch.allclose(logprobs, expected, rtol=0, atol=BOUND[dtype])


def until_done(session, rows) -> None:
    """Step until all of these have ended."""
    left = set(rows)
    while left:
        assert session.busy
        left -= set(session.step())


def lasting(model, prompts) -> Ragged:
    """The prompts whose greedy rows come to no end of their own."""
    return Ragged.from_rows([prompt for prompt in prompts.rows if len(greedy_of(model, prompt)) == LIMIT])


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_greedy_tokens_of_other_families(name, mesh, prompts, architecture):
    model = tiny(architecture)
    engine = build(name, mesh, model)
    try:
        require_greedy(engine, model, prompts)
        engine.load(weights(changed(model)), version=1)
        require_greedy(engine, model, prompts)
    finally:
        engine.close()


def test_greedy_tokens_are_those_of_transformers_before_and_after_an_update(engine, model, prompts):
    require_greedy(engine, model, prompts)
    before = [greedy_of(model, prompt) for prompt in prompts.rows]
    size = engine.load(iter(weights(changed(model))), version=4)
    assert size == sum(tensor.numel() * engine.dtype.itemsize for _, tensor in weights(model))
    assert engine.version == 4
    assert before != [greedy_of(model, prompt) for prompt in prompts.rows]
    require_greedy(engine, model, prompts)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 5, 1.0),
                                                             (1.3, 0, 0.5)])
def test_logprobs_are_a_plain_forwards_before_top_k_and_top_p(engine, model, prompts, temperature, top_k, top_p):
    engine.generation = engine.generation.model_copy(update={"top_k": top_k, "top_p": top_p})
    for version in range(2):
        engine.load(weights(model), version)
        samples = engine.generate(prompts, 4, torch.arange(4 * len(prompts)), key=3, temperature=temperature)
        require_logprobs(model, prompts, samples, temperature)
        assert samples.versions.values.unique().tolist() == [version]
        if top_k:
            for place, row in enumerate(samples.tokens.rows):
                prompt = prompts.rows[place // 4]
                logits = model(torch.cat([prompt, row])[None]).logits[0, len(prompt) - 1 : -1]
                assert (logits.topk(top_k).indices == row[:, None]).any(1).all()
        changed(model)


def test_a_session_may_have_other_limits_than_the_engine(engine, model, prompts):
    """As validation does: of its rows and no other's. Log-probabilities are those before the limits all the same."""
    ids = torch.arange(4 * len(prompts))
    free, narrow, again = (engine.generate(prompts, 4, ids, key=3, temperature=1.0, limits=limits)
                           for limits in (None, TokenLimits(1, 1.0, 0.0), None))
    assert free.tokens.values.tolist() == again.tokens.values.tolist()
    for place, prompt in enumerate(prompts.rows):
        for row in narrow.tokens.rows[4 * place : 4 * place + 4]:
            assert row.tolist() == greedy_of(model, prompt)
    assert free.tokens.values.tolist() != narrow.tokens.values.tolist()
    require_logprobs(model, prompts, narrow)
    held = [engine.generate(prompts, 4, ids, key=3, limits=limits).tokens.values.tolist() for limits in (
        TokenLimits(0, 0.4, 0.0), None)]
    assert held[0] != held[1]


def test_logprobs_in_bfloat16(name, mesh, prompts):
    model = tiny()
    engine = build(name, mesh, model, "bfloat16")
    half = tiny().to(torch.bfloat16)
    try:
        for version in range(2):
            samples = engine.generate(prompts, 4, torch.arange(4 * len(prompts)), key=3)
            require_logprobs(half, prompts, samples, dtype="bfloat16")
            engine.load(weights(changed(model)), version + 1)
            half.load_state_dict(model.state_dict())
    finally:
        engine.close()


def test_a_tensor_may_be_overwritten_as_soon_as_the_next_is_asked_for(engine, model, prompts):
    """As those of a reshard are, which go through one buffer."""
    buffer = torch.empty(max(tensor.numel() for _, tensor in weights(model)))

    def arriving():
        for each, tensor in weights(changed(model)):
            buffer.fill_(torch.nan)
            place = buffer[: tensor.numel()].view(tensor.shape)
            yield each, place.copy_(tensor)
        buffer.fill_(torch.nan)

    engine.load(arriving(), version=1)
    require_greedy(engine, model, prompts)


def test_what_does_not_come_stays(engine, model, prompts):
    first = dict(weights(model))
    some = [name for name in first if "norm" in name or "mlp" in name]
    with torch.no_grad():
        for name in some:
            first[name].mul_(1.5)
    engine.load([(name, first[name]) for name in some], version=1)
    require_greedy(engine, model, prompts)


@pytest.mark.parametrize(("odd", "says"), [(("model.layers.9.nonsense", torch.zeros(3)), "nonsense"),
                                           (("model.norm.weight", torch.zeros(3)), r"\[3\]")])
@pytest.mark.parametrize("place", [0, 7, 100])
def test_a_wrong_update_is_refused_and_the_engine_goes_on(engine, model, prompts, odd, says, place):
    update = weights(changed(model))
    with pytest.raises(EngineError, match=says):
        engine.load(iter([*update[:place], odd, *update[place:]]), version=1)
    assert engine.version == 0
    engine.check_health()
    engine.load(weights(model), version=2)
    require_greedy(engine, model, prompts)


def test_short_rows_come_back_before_long_ones(engine, model, prompts):
    prompts = lasting(model, prompts)
    rows = engine.rows(prompts, 1, torch.arange(len(prompts)))
    for place, row in enumerate(rows):
        row.limit = 3 if place % 2 else LIMIT
    session, order = engine.session(key=1, temperature=0.0), []
    for row in rows:
        session.add([row])
    while session.busy:
        order += session.step()
    assert [row.limit for row in order] == sorted(row.limit for row in rows)
    assert len(order) == len(rows) > 2


def test_a_text_ends_a_row_with_the_token_that_completes_it(engine, prompts):
    """What comes before it is sampled as ever, and keeps its log-probabilities: nothing is cut off."""
    tokenizer, ids = build_tokenizer(["one two three"], vocab_size=VOCABULARY), torch.arange(4 * len(prompts))
    whole = engine.generate(prompts, 4, ids, key=3)
    pairs = [tokenizer.decode(row[place : place + 2]) for row in whole.tokens.rows for place in range(1, len(row) - 2)]
    text = next(pair for pair in pairs if pair.isascii() and pair.isprintable() and len(pair) == 2)
    engine.stop = StopStrings(tokenizer, [text, "never said"])
    stopped, shortened = engine.generate(prompts, 4, ids, key=3), 0
    for place, (before, after) in enumerate(zip(whole.tokens.rows, stopped.tokens.rows)):
        assert torch.equal(after, before[: len(after)])
        logprobs = whole.logprobs.rows[place][: len(after)]
        assert torch.allclose(stopped.logprobs.rows[place], logprobs, rtol=0, atol=BOUND["float32"])
        assert text not in tokenizer.decode(after[:-1])
        if text in tokenizer.decode(before):
            assert text in tokenizer.decode(after)
            assert stopped.finished[place]
            shortened += len(after) < len(before)
        else:
            assert len(after) == len(before)
            assert stopped.finished[place] == whole.finished[place]
    assert shortened


def test_an_abort_gives_what_there_is_and_the_row_goes_on_as_if_nothing_had_been(engine, model, prompts):
    prompts = lasting(model, prompts)
    rows = engine.rows(prompts, 1, torch.arange(len(prompts)))
    session = engine.session(key=1, temperature=0.0, keep_cache=True)
    for row in rows:
        session.add([row])
    gone = rows[0]
    for _ in range(4):
        session.step()
    assert session.abort([gone]) == [gone]
    assert not gone.finished
    assert len(gone.tokens) == len(gone.logprobs) == len(gone.versions) < LIMIT
    assert session.abort([gone]) == []
    until_done(session, rows[1:])
    assert not session.busy
    said = gone.tokens.tolist()
    session.extend(gone, torch.empty(0, dtype=torch.int64), LIMIT - len(said))
    until_done(session, [gone])
    assert said + gone.tokens.tolist() == greedy_of(model, prompts.rows[0])
    for row, prompt in zip(rows[1:], prompts.rows[1:]):
        assert row.tokens.tolist() == greedy_of(model, prompt)


def test_an_aborted_row_draws_what_it_would_have_drawn(engine, prompts):
    rows = engine.rows(prompts, 2, torch.arange(2 * len(prompts)) + 9)
    whole = engine.generate(prompts, 2, torch.arange(2 * len(prompts)) + 9, key=6)
    session = engine.session(key=6, keep_cache=True)
    for start in range(0, len(rows), 2):
        session.add(rows[start : start + 2])
    said = {row: [] for row in rows}
    for _ in range(3):
        session.step()
    for row in session.abort():
        said[row] = row.tokens.tolist()
        session.extend(row, torch.empty(0, dtype=torch.int64), LIMIT - len(said[row]))
    while session.busy:
        session.step()
    assert [said[row] + row.tokens.tolist() for row in rows] == [row.tolist() for row in whole.tokens.rows]


def test_what_one_rank_has_begun_another_ends(engine, model, prompts):
    """Under weights of another version, which here are the same."""
    ids = torch.arange(2 * len(prompts)) + 9
    whole = engine.generate(prompts, 2, ids, key=6)
    first = PartialRollouts(engine, Batch(ids[:0]))
    rows, session = engine.rows(prompts, 2, ids), engine.session(key=6)
    first.take_over(rows)
    for row in rows[1:]:  # of one, nothing is there
        session.add([row])
    for _ in range(4):
        session.step()
    session.abort()
    begun = first.partial_rows()
    assert 0 < len(begun["partial/tokens"].values) < len(whole.tokens.values)
    engine.load(weights(model), version=7)
    metrics = Metrics()
    with recording(metrics):
        samples = PartialRollouts(engine, begun).generate(prompts, 2, ids, key=6)
    assert [row.tolist() for row in samples.tokens.rows] == [row.tolist() for row in whole.tokens.rows]
    assert torch.allclose(samples.logprobs.values, whole.logprobs.values, rtol=0, atol=BOUND["float32"])
    assert torch.equal(samples.finished, whole.finished)
    kept = torch.zeros(len(ids), dtype=torch.int64)
    kept[1:] = begun["partial/tokens"].lengths
    for row, count in zip(samples.versions.rows, kept.tolist()):
        assert row.tolist() == [0] * count + [7] * (len(row) - count)
    assert metrics.collect(lambda told: [told]).get("response/continued", 0) == int(kept.sum())


def test_an_abort_of_all_ends_rows_that_wait_too(engine, prompts):
    rows = engine.rows(prompts.select(torch.arange(6).repeat(20)), 1, torch.arange(120))
    session = engine.session(key=2, temperature=0.0)
    for row in rows:
        session.add([row])
    ended = session.step()
    aborted = session.abort()
    while session.busy:
        ended += session.step()
    assert set(ended) | set(aborted) == set(rows)
    assert len(ended) + len(aborted) == len(rows)
    assert any(len(row.tokens) == 0 for row in aborted)
    assert not any(row.finished for row in aborted)


def test_pause_and_resume(engine, model, prompts):
    rows = engine.rows(prompts, 1, torch.arange(len(prompts)))
    session = engine.session(key=1, temperature=0.0)
    for row in rows:
        session.add([row])
    ended = session.step() + session.step()
    engine.pause()
    assert [session.step() for _ in range(3)] == [[]] * 3
    assert session.busy
    engine.resume()
    until_done(session, set(rows) - set(ended))
    assert [row.tokens.tolist() for row in rows] == [greedy_of(model, prompt) for prompt in prompts.rows]


def test_versions_say_which_weights_sampled_each_token(engine, model, prompts):
    rows = engine.rows(lasting(model, prompts), 1, torch.arange(len(lasting(model, prompts))))
    engine.load(weights(model), version=3)
    session = engine.session(key=1, temperature=0.0)
    for row in rows:
        session.add([row])
    for _ in range(5):
        assert session.step() == []
    engine.load(weights(model), version=8)
    until_done(session, rows)
    for row in rows:
        versions = row.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {3, 8}
        assert row.versions.dtype == torch.int32
        assert len(versions) == len(row.tokens) == len(row.logprobs)
        assert row.tokens.tolist() == greedy_of(model, row.sequence)


def test_a_turn_after_an_observation_is_a_fresh_prompts(engine, model, prompts):
    rows = engine.rows(prompts, 1, torch.arange(len(prompts)), max_new_tokens=5)
    session = engine.session(key=1, temperature=0.0, keep_cache=True)
    for row in rows:
        session.add([row])
    until_done(session, rows)
    for row in rows:
        assert row.tokens.tolist() == greedy_of(model, row.sequence, 5)
        session.extend(row, torch.arange(40, 40 + row.id), limit=7)
    until_done(session, rows)
    for row in rows:
        assert row.tokens.tolist() == greedy_of(model, row.sequence, 7)
        expected = logprobs_of(model, row.sequence, row.tokens)
        assert torch.allclose(row.logprobs, expected, rtol=0, atol=BOUND["float32"])
        session.forget(row)


def test_a_row_draws_the_same_in_any_company(engine, prompts):
    ids = torch.arange(4 * len(prompts)) + 40
    whole = engine.generate(prompts, 4, ids, key=9)
    alone = [engine.generate(prompts.slice(place, place + 1), 4, ids[4 * place : 4 * place + 4], key=9)
             for place in reversed(range(len(prompts)))]
    assert whole.tokens.values.tolist() == [token for samples in reversed(alone)
                                            for token in samples.tokens.values.tolist()]
    other = engine.generate(prompts, 4, ids, key=10)
    assert whole.tokens.values.tolist() != other.tokens.values.tolist()
    rows = [tuple(row.tolist()) for row in whole.tokens.rows]
    assert len(set(rows)) > len(prompts)


def test_two_sessions_do_not_disturb_each_other(engine, model, prompts):
    ids = torch.arange(len(prompts))
    drawn = engine.generate(prompts, 1, ids, key=2)
    sessions = [engine.session(key=1, temperature=0.0), engine.session(key=2)]
    groups = [engine.rows(prompts, 1, ids) for _ in sessions]
    for session, rows in zip(sessions, groups):
        for row in rows:
            session.add([row])
    while any(session.busy for session in sessions):
        for session, rows in zip(sessions, groups):
            assert set(session.step()) <= set(rows)
    assert [row.tokens.tolist() for row in groups[0]] == [greedy_of(model, prompt) for prompt in prompts.rows]
    assert [row.tokens.tolist() for row in groups[1]] == [row.tolist() for row in drawn.tokens.rows]


def test_rows_end_with_an_end_token_or_at_their_limit(engine, prompts):
    rows = engine.rows(prompts, 8, torch.arange(8 * len(prompts)))
    for row in rows:
        row.limit = 1 + row.id % LIMIT
    session = engine.session(key=4)
    for start in range(0, len(rows), 8):
        session.add(rows[start : start + 8])
    while session.busy:
        session.step()
    for row in rows:
        tokens = row.tokens.tolist()
        assert not set(tokens[:-1]) & set(ENDS)
        assert row.finished == (tokens[-1] in ENDS)
        assert row.finished or len(tokens) == row.limit
    assert 5 < sum(row.finished for row in rows) < len(rows) - 5
    assert len({row.tokens[-1].item() for row in rows if row.finished}) > 1


def test_weights_are_loaded_after_sleep(engine, model, prompts):
    engine.generate(prompts, 1, torch.arange(len(prompts)), key=0)
    for _ in range(2):
        engine.sleep()
        engine.wake()
        assert engine.version == -1
        engine.load(weights(changed(model)), version=1)
        require_greedy(engine, model, prompts)
    engine.check_health()


def test_no_prompts_give_no_samples(engine):
    samples = engine.generate(Ragged.from_rows([]), 4, torch.empty(0, dtype=torch.int64), key=0)
    assert len(samples.tokens) == len(samples.logprobs) == len(samples.versions) == len(samples.finished) == 0


def test_an_engine_may_be_closed_twice_while_others_go_on(engine, model, name, mesh, prompts):
    other = build(name, mesh, model)
    session = other.session(key=0)
    session.add(other.rows(prompts.slice(0, 1), 2, torch.arange(2)))
    session.step()
    other.close()
    other.close()
    require_greedy(engine, model, prompts)
