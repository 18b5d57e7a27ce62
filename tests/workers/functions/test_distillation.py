"""Distillation from teachers, against dense references in float64."""

from __future__ import annotations

import pytest
import torch
from reported import reported
from torch import nn

from distflow.data.batch import Ragged
from distflow.errors import InvalidInput
from workers.engines import vocabulary
from workers.functions.distillation import concat_teachers, distillation_advantage, distillation_update, divergence


def ragged(rows, dtype=torch.float64):
    return Ragged.from_rows([torch.tensor(row, dtype=dtype) for row in rows], dtype)


def test_each_token_gains_what_the_teacher_gives_it_more_and_the_metric_counts_trained_ones():
    student, teacher = ragged([[-1.0, -2.0], [], [-3.0]]), ragged([[-1.5, -0.25], [], [-4.0]])
    reported()
    advantages = distillation_advantage(student, student, teacher, ragged([[True, False], [], [True]], torch.bool))
    assert advantages.values.tolist() == pytest.approx([-0.5, 1.75, -1.0], abs=1e-6)
    assert advantages.lengths.tolist() == [2, 0, 1]
    assert reported()["distillation/reverse_kl"] == pytest.approx(0.75, abs=1e-6)


@pytest.mark.parametrize(("places", "misplaced"), [(0, -1.0), (1, 1.0), (-1, 1.0)])
def test_log_probabilities_of_a_neighbour_are_told(places, misplaced):
    tokens = torch.randint(0, 20, (40, 30), generator=torch.Generator().manual_seed(0))
    student = ragged((-tokens.double()).tolist())
    reported()
    distillation_advantage(ragged(tokens.tolist(), torch.int64), student, ragged(
        (-tokens.double()).roll(places, 1).tolist()))
    assert reported()["distillation/misplaced"] == pytest.approx(misplaced, abs=0.1)


@pytest.mark.parametrize("student", ["the same", "noise"])
def test_a_teacher_that_knows_what_is_copied_is_in_its_places(student):
    """A digit is free where it comes first, and certain behind the sign of a copy: the token before decides."""
    draw = torch.Generator().manual_seed(1)
    digits = torch.randint(0, 10, (300, 1), generator=draw)
    tokens = torch.cat([torch.full((300, 1), 10), digits, torch.full((300, 1), 11), digits], 1)
    teacher = torch.tensor([-0.01, -2.3, -0.01, -0.01]).expand(300, 4).double()
    teacher = teacher + 0.01 * torch.randn(300, 4, generator=draw)
    scored = teacher if student == "the same" else -2 + torch.randn(300, 4, generator=draw).double()
    reported()
    distillation_advantage(ragged(tokens.tolist(), torch.int64), ragged(scored.tolist()), ragged(teacher.tolist()))
    assert reported()["distillation/misplaced"] < 0.1


def test_few_tokens_tell_nothing_of_their_places():
    reported()
    distillation_advantage(ragged([[1, 2, 3, 4]], torch.int64), ragged([[-1.0] * 4]), ragged([[-1.0] * 4]))
    assert "distillation/misplaced" not in reported()


KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jensen_shannon", 0.2), ("jensen_shannon", 0.9)]
TOKENS, WIDTH, WORDS = 20, 8, 60


def dense(kind: str, student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergence of log-probabilities of all outcomes, by its definition."""
    def kl(one, other):
        return (one.exp() * (one - other)).sum(-1)

    if kind == "jensen_shannon":
        mean = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
        return beta * kl(teacher, mean) + (1 - beta) * kl(student, mean)
    return kl(student, teacher) if kind == "reverse_kl" else kl(teacher, student)


def merged(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of these tokens, and of all others together, of which there may be none."""
    others = torch.ones_like(logprobs, dtype=torch.bool).scatter(1, tokens, False)
    rest = logprobs.exp().where(others, 0.0).sum(1, keepdim=True)
    inside = logprobs.gather(1, tokens)
    return torch.cat([inside, rest.log()], 1) if bool(others.any()) else inside


def drawn(seed: int, words: int = WORDS) -> tuple[torch.Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, words, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(words, WIDTH, generator=generator) / 4)
    return torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True), head


@pytest.mark.parametrize("piece", [WORDS * 3, vocabulary.PIECE])
@pytest.mark.parametrize("k", [1, 7, WORDS])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_values_and_gradients_are_those_of_all_logits_at_once(monkeypatch, kind, beta, k, piece):
    monkeypatch.setattr(vocabulary, "PIECE", piece)
    (hidden, head), (other, teacher) = drawn(0), drawn(1)
    counts = torch.linspace(0.5, 2, TOKENS)
    tokens, logprobs = vocabulary.top_logprobs(other, teacher, k, 0.7)
    student, _ = vocabulary.score(hidden, head, tokens.long(), 0.7)
    found = divergence(kind, student, logprobs, beta)
    gradients = torch.autograd.grad((found * counts).sum(), [hidden, head.weight])
    exact = [part.detach().double().requires_grad_() for part in (hidden, head.weight)]
    q = torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1)
    p = torch.log_softmax(other.detach().double() @ teacher.weight.detach().double().T / 0.7, -1)
    expected = dense(kind, *(merged(each, tokens.long()) for each in (q, p)), beta)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    for one, wanted in zip(gradients, torch.autograd.grad((expected * counts).sum(), exact)):
        assert torch.allclose(one.double(), wanted, atol=1e-4)
    whole = dense(kind, q, p, beta)
    assert bool((expected <= whole + 1e-9).all())  # never above that of the whole vocabulary
    assert k < WORDS or torch.allclose(expected, whole)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_a_token_that_the_student_lacks_counts_among_all_others(kind, beta):
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    student, teacher = torch.log_softmax(logits, -1)[:, None, :4]
    student.requires_grad_()
    lacking = teacher.clone()
    lacking[:, 2] = -torch.inf
    found, expected = (divergence(kind, student[:, list(some)], each[:, list(some)], beta)
                       for some, each in ((range(4), lacking), ((0, 1, 3), teacher)))
    assert torch.allclose(found, expected)
    assert torch.isfinite(torch.autograd.grad(found.sum(), student)[0]).all()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_certain_models_have_finite_gradients(kind, beta):
    """Nothing is left for other tokens, or all is."""
    for student, teacher in (([0.0, -90.0], [0.0, -80.0]), ([-90.0, -95.0], [0.0, -80.0]), ([0.0, -9.0], [-70.0, -80])):
        logprobs = torch.tensor([student], requires_grad=True)
        loss = divergence(kind, logprobs, torch.tensor([teacher]), beta)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(torch.autograd.grad(loss.sum(), logprobs)[0]).all()


class Table:
    """A role whose model is a table of logits, the same for every token."""

    vocabulary = 5

    def __init__(self):
        self.logits = torch.tensor([0.3, -0.7, 1.1, 0.0, 0.2], dtype=torch.float64, requires_grad=True)
        self.gradient: torch.Tensor | None = None

    def total(self, values):
        return values

    def update(self, batch, loss_of, temperature=None):
        logprobs = torch.log_softmax(self.logits, 0)[batch["candidates"].values.long()]
        loss = loss_of(logprobs, torch.zeros(len(logprobs)), batch)
        (self.gradient,) = torch.autograd.grad(loss, self.logits)
        return {}


def column(*tokens_of_rows) -> Ragged:
    return Ragged.from_rows([torch.tensor(row) for row in tokens_of_rows])


def test_two_teachers_have_their_weights_and_masked_tokens_count_for_nothing():
    responses, mask = column([1, 2, 3], [4]), column([True, False, True], [True])
    logprobs = torch.log_softmax(torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).double(), -1)
    best = logprobs.topk(3)  # of the sixth token the student knows nothing
    first, second = ([responses.with_values(part[teacher]) for part in (best.indices.int(), best.values)]
                     for teacher in (0, 1))
    role = Table()
    columns = concat_teachers(*concat_teachers(None, None, *first), *second)
    distillation_update(role, responses, responses, *columns, torch.tensor([0, 1]), mask,
                        divergence="forward_kl", weights=[0.7, 0.3])
    q = torch.log_softmax(role.logits, 0)
    expected = torch.zeros((), dtype=torch.float64)
    for weight, p, indices in zip((0.7, 0.3), logprobs, best.indices):
        for token in (0, 2, 3):
            known = [index for index in indices[token].tolist() if index < 5]
            p_k, q_k = p[token, known], q[known]
            p_k, q_k = (torch.cat([each, (1 - each.exp().sum()).log()[None]]) for each in (p_k, q_k))
            expected = expected + weight * (p_k.exp() * (p_k - q_k)).sum() / 3
    assert torch.allclose(role.gradient, torch.autograd.grad(expected, role.logits)[0], atol=1e-6)


def test_teachers_of_unlike_k_and_weights_of_another_number_are_refused():
    responses = column([1, 2])
    one, other = ((responses.with_values(torch.zeros(2, k, dtype=torch.int32)),
                   responses.with_values(torch.zeros(2, k))) for k in (3, 2))
    with pytest.raises(InvalidInput, match=r"gives 2 tokens at each place, and the one before it 3.*\{k: 2\}"):
        concat_teachers(*concat_teachers(None, None, *one), *other)
    with pytest.raises(InvalidInput, match="`weights` has 2 numbers, and there are 1 teachers"):
        distillation_update(Table(), responses, responses, *concat_teachers(None, None, *one), torch.tensor([0]),
                            weights=[1.0, 2.0])


@pytest.mark.parametrize("own", [torch.empty(0), torch.empty(0, 3)])
def test_a_rank_without_rows_takes_part(own):
    none = Ragged(torch.empty(0), torch.empty(0, dtype=torch.int64))
    for column in concat_teachers(none, none, none.with_values(own.int()), none.with_values(own)):
        assert len(column) == len(column.values) == 0
    distillation_update(Table(), none, none, none, none, torch.empty(0, dtype=torch.int64), weights=[0.5, 0.5])
