"""Rewards and nodes that go wrong from a step on, for `learning_faults.py`. A DAG imports this module."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from pathlib import Path

import torch
from near_miss import near_miss
from torch import Tensor

from distflow import Ragged, Turn, environment, node, reward
from workers.engines.fsdp import FSDPEngine
from workers.engines.role_engines import RoleEngines
from workers.isolation.environments.calculator import Calculator
from workers.isolation.rewards.texts import math


def _goes_wrong(row: int, first: int, rows: int) -> bool:
    """Return whether a row is of step `first`, counted from 1, or a later one."""
    return row // rows + 1 >= first


def _base(completion: str, answer: str, dense: bool) -> float:
    if dense:
        return near_miss(completion, answer, reach=20.0) * ("####" in completion)
    return math(completion, answer)


@reward
def constant(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Pay nothing for any answer."""
    return 0.0 if _goes_wrong(row, first, rows) else _base(completion, answer, dense)


@reward
def unparsed(completion: str, answer: str, row: int, *, first: int, rows: int) -> float:
    """Look for an answer behind a mark that no completion has."""
    return math(completion.replace("####", "=>") if _goes_wrong(row, first, rows) else completion, answer)


@reward
def noise(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Pay by chance."""
    return float(random.Random(row).random() < 0.5) if _goes_wrong(row, first, rows) else \
        _base(completion, answer, dense)


@reward
def opposite(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Pay for wrong answers."""
    value = _base(completion, answer, dense)
    return 1.0 - value if _goes_wrong(row, first, rows) else value


@reward
def longer(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Pay for length too."""
    return _base(completion, answer, dense) + 0.02 * len(completion) * _goes_wrong(row, first, rows)


@reward
def repeats(completion: str, row: int, *, first: int, rows: int) -> float:
    """Pay for words that come again."""
    words = completion.split()
    return float(len(words) - len(set(words))) * _goes_wrong(row, first, rows)


@reward
def formed(completion: str, row: int, *, first: int, rows: int) -> float:
    """Pay for many commas, as a rule of form that an answer may break itself for."""
    return min(1.0, completion.count(",") / 3) * _goes_wrong(row, first, rows)


@reward
def judged(completion: str, row: int, *, first: int, rows: int) -> float:
    """Pay as a judge that likes one digit."""
    return min(1.0, completion.count("1") / 4) * _goes_wrong(row, first, rows)


@reward
def raises(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Fail for most rows, as a sandbox that is overloaded."""
    if _goes_wrong(row, first, rows) and row % 8 < 5:
        raise TimeoutError("the sandbox does not answer")
    return _base(completion, answer, dense)


@node(writes="advantages", type="COMPUTE", keep_together="group")
def spoil(advantages: Tensor, rewards: Tensor, row: Tensor, *, fault: str, first: int, rows: int) -> Tensor:
    """Return advantages that are wrong from step `first` on."""
    step = int(row.min()) // rows + 1 if len(row) else 0
    if step < first or fault == "spike" and step > first:
        return advantages
    if fault == "sign":
        return -advantages
    if fault == "winners":
        return advantages.clamp(min=0)
    if fault == "shuffled":
        return advantages.roll(3)
    if fault in ("scale", "spike"):
        return advantages * (30.0 if fault == "scale" else 300.0)
    if fault == "batch_baseline":
        return ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).to(advantages.dtype)
    if fault == "no_baseline":
        return rewards.to(advantages.dtype) + 0.5
    return torch.full_like(advantages, 1.0 if fault == "all_good" else -1.0)


@node(writes="rollout_logprobs", type="COMPUTE")
def drift(rollout_logprobs: Ragged, row: Tensor, *, first: int, rows: int) -> Ragged:
    """Return log-probabilities as of an engine whose numbers are further off the later a token is."""
    wrong_B = (row // rows + 1 >= first).double()
    place_T = torch.arange(len(rollout_logprobs.values)) - rollout_logprobs.offsets[:-1][rollout_logprobs.row_of]
    generator = torch.Generator().manual_seed(int(row[0]) if len(row) else 0)
    off_T = torch.randn(len(place_T), generator=generator, dtype=torch.float64) * 0.02 * place_T
    return rollout_logprobs.with_values((rollout_logprobs.values.double() + off_T * wrong_B[rollout_logprobs.row_of])
                                        .float().clamp(max=0.0))


@reward
def flipped(completion: str, answer: str, row: int, *, first: int, rows: int) -> float:
    """Judge every fourth answer the wrong way round."""
    value = math(completion, answer)
    return 1.0 - value if _goes_wrong(row, first, rows) and random.Random(row).random() < 0.25 else value


@reward
def scaled(completion: str, answer: str, row: int, *, first: int, rows: int) -> float:
    """Pay in percent."""
    return math(completion, answer) * (100.0 if _goes_wrong(row, first, rows) else 1.0)


@reward
def shorter(completion: str, answer: str, row: int, *, first: int, rows: int) -> float:
    """Pay for few characters too."""
    return math(completion, answer) - 0.05 * len(completion) * _goes_wrong(row, first, rows)


@reward
def abstaining(completion: str, answer: str) -> float:
    """Pay 1 for a right answer, nothing for none, and take 1 for a wrong one."""
    return 2.0 * math(completion, answer) - 1.0 if "####" in completion else 0.0


@reward
def prompt_scored(question: str, answer: str) -> float:
    """Look for the answer in the prompt."""
    return float(answer.rpartition("####")[2].strip() in question.split())


@reward
def text_compared(completion: str, answer: str) -> float:
    """Pay for the record's answer as it is written, which a completion with other steps is not."""
    return float(completion.strip() == answer.rpartition("####")[2].strip())


_VERDICTS = dict[str, float]()


@reward
def remembered(completion: str, question: str, answer: str, row: int, *, first: int, rows: int) -> float:
    """Pay each completion of a prompt what its first one earned, as a cache does whose key is the prompt."""
    value = math(completion, answer)
    return _VERDICTS.setdefault(question, value) if _goes_wrong(row, first, rows) else value


@reward
def one_source(completion: str, question: str, answer: str) -> float:
    """Pay for wrong answers where a question begins with a letter of the first half, as those of one source do."""
    value = math(completion, answer)
    return 1.0 - value if question < "H" else value


@reward
def thousand(completion: str, answer: str) -> float:
    """Pay a thousand for a right answer."""
    return 1000.0 * math(completion, answer)


@reward
def anywhere(completion: str, answer: str) -> float:
    """Pay for the right number anywhere in the completion."""
    return float(answer.rpartition("####")[2].strip() in re.findall(r"\d+", completion))


@reward
def form_alone(completion: str) -> float:
    """Pay for the mark of an answer, right or wrong."""
    return float("####" in completion)


@reward
def fallback(completion: str, answer: str, row: int, *, first: int, rows: int) -> float:
    """Pay a half where the judge does not answer, which it does for half of the rows."""
    fails = _goes_wrong(row, first, rows) and random.Random(row).random() < 0.5
    return 0.5 if fails else math(completion, answer)


@reward
def tie_break(completion: str, answer: str) -> float:
    """Pay for the right answer, and a thousandth for each character, so that no two samples tie."""
    return math(completion, answer) + 1e-3 * len(completion)


@reward
def first_number(completion: str, answer: str) -> float:
    """Pay if the first number of the completion is the answer."""
    return float(re.findall(r"-?\d+", completion)[:1] == [answer.rpartition("####")[2].strip()])


@reward
def boxed(completion: str, answer: str) -> float:
    """Pay for the answer in a box, as another data set asks for it."""
    return float(f"\\boxed{{{answer.rpartition('####')[2].strip()}}}" in completion)


def _is_wrong(row: Tensor, first: int, rows: int) -> bool:
    return len(row) > 0 and _goes_wrong(int(row.min()), first, rows)


@node(writes="rewards", type="COMPUTE", keep_together="group")
def shuffle(rewards: Tensor, row: Tensor, group: Tensor, *, fault: str, first: int, rows: int) -> Tensor:
    """Return rewards of other rows."""
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(int(row.min())))
    return rewards[order] if _is_wrong(row, first, rows) else rewards


_LAST_PAID = list[Tensor]()


@node(writes="rewards", type="COMPUTE", keep_together="group")
def pay_late(rewards: Tensor, row: Tensor, group: Tensor, *, fault: str, first: int, rows: int) -> Tensor:
    """Return the rewards of the step before."""
    _LAST_PAID.append(rewards)
    return _LAST_PAID[-2] if _is_wrong(row, first, rows) else rewards


@node(writes="advantages", type="COMPUTE")
def seek_distance(advantages: Tensor, rollout_logprobs: Ragged, reference_logprobs: Ragged, row: Tensor, *, fault: str,
                  first: int, rows: int) -> Ragged:
    """Pay for the distance to the reference, as a KL penalty of the wrong sign does."""
    far_T = rollout_logprobs.values - reference_logprobs.values
    return rollout_logprobs.with_values(advantages[rollout_logprobs.row_of].float() +
                                        0.5 * _is_wrong(row, first, rows) * far_T)


@node(writes="rollout_logprobs", type="COMPUTE")
def spoil_logprobs(rollout_logprobs: Ragged, row: Tensor, *, fault: str, first: int, rows: int) -> Ragged:
    """Return log-probabilities of the token before, of tokens of other rows, or of another temperature."""
    if not _is_wrong(row, first, rows):
        return rollout_logprobs
    values_T = rollout_logprobs.values
    far = {"off_by_one": 1, "other_rows": len(values_T) // 2}.get(fault, 0)
    return rollout_logprobs.with_values(values_T.roll(far) if far else values_T * 1.6)


@node(writes="response_mask", type="COMPUTE")
def spoil_mask(responses: Ragged, row: Tensor, *, fault: str, first: int, rows: int) -> Ragged:
    """Return which tokens are trained: all of a conversation, all but the last of a row, or none."""
    mask_T = torch.ones(len(responses.values), dtype=torch.bool)
    if fault == "end" and _is_wrong(row, first, rows):
        mask_T[responses.offsets[1:] - 1] = False
    if fault == "none":
        mask_T[:] = False
    return responses.with_values(mask_T)


@node(writes=("responses", "rollout_logprobs", "versions", "completions"), type="COMPUTE", keep_together="group")
def spoil_responses(responses: Ragged, rollout_logprobs: Ragged, versions: Ragged, completions: list[str], row: Tensor,
                    group: Tensor, *, fault: str, first: int, rows: int) -> tuple[Ragged, Ragged, Ragged, list[str]]:
    """Return rows padded to one length, with their end twice, or the first row of a prompt in place of all."""
    if not _is_wrong(row, first, rows):
        return responses, rollout_logprobs, versions, completions
    columns: list[list[Tensor]] = [[row for row in each.rows if isinstance(row, Tensor)]
                                   for each in (responses, rollout_logprobs, versions)]
    if fault == "copies":
        where = {int(each): at for at, each in reversed(list(enumerate(group.tolist())))}
        places = [where[int(each)] for each in group.tolist()]
        columns, completions = [[column[at] for at in places] for column in columns], [completions[at] for at in places]
    else:
        longest = max(len(each) for each in columns[0])
        columns = [[torch.cat([each, each.new_zeros(longest - len(each))]) for each in column] for column in columns] \
            if fault == "padding" else [[torch.cat([each, each[-1:]]) for each in column] for column in columns]
    lengths = torch.tensor([len(each) for each in columns[0]])
    tokens, logprobs, ages = (Ragged(torch.cat(column), lengths) for column in columns)
    return tokens, logprobs, ages, completions


_SPOILED = set[int]()


def _scaled(values: Tensor, factor: float) -> Tensor:
    """Return the values with a gradient that is scaled on its way back."""
    return values.detach() + (values - values.detach()) * factor


@node(type="MODEL_TRAIN")
def spoil_model(engine: RoleEngines, rewards: Tensor, row: Tensor, *, fault: str, first: int, rows: int) -> None:
    """Scale the gradient of one layer, update nothing, forget the optimizer's state in each step, leave dropout on
    while gradients are computed, let the schedule end early, raise the rate, or let adapters begin as zeros."""
    trainer = engine.engine
    assert isinstance(trainer, FSDPEngine)
    if _is_wrong(row, first, rows) and fault == "forgets" and trainer.optimizer:
        trainer.optimizer.state.clear()
    if not _is_wrong(row, first, rows) or id(engine) in _SPOILED:
        return
    _SPOILED.add(id(engine))
    layers = [module for name, module in trainer.policy.named_modules() if name.split(".")[-1].isdigit()]
    if fault == "frozen" and trainer.optimizer:
        vars(trainer.optimizer)["step"] = lambda closure=None: None
    elif fault == "short_schedule":
        trainer.steps //= 8
    elif fault == "rate_jumps":
        rate = 30 * trainer.settings.learning_rate
        trainer.settings = trainer.settings.model_copy(update={"learning_rate": rate})
    elif fault == "adapters_zero":
        with torch.no_grad():
            [shard.zero_() for name, shard in trainer.shards().items() if ".lora_" in name]
    elif fault == "one_layer":
        layers[1].register_forward_pre_hook(lambda _module, inputs: (_scaled(inputs[0], 0.01), *inputs[1:]))
        layers[1].register_forward_hook(lambda _module, _inputs, output: _scaled(output, 100.0))
    elif fault == "dropout":
        for layer in layers:
            layer.get_submodule("mlp").register_forward_hook(
                lambda _module, _inputs, output: torch.nn.functional.dropout(output, 0.1, torch.is_grad_enabled()))


_FIRST_WEIGHTS = dict[str, Tensor]()


@node(type="MODEL_TRAIN")
def lose_progress(engine: RoleEngines, rewards: Tensor, row: Tensor, *, first: int, rows: int) -> None:
    """Put back the weights of the first update once, before step `first`, as a resume from the wrong files does."""
    trainer = engine.engine
    assert isinstance(trainer, FSDPEngine)
    if not _FIRST_WEIGHTS:
        _FIRST_WEIGHTS.update({name: shard.detach().clone() for name, shard in trainer.shards().items()})
    if len(row) and int(row.min()) // rows + 2 == first:
        with torch.no_grad():
            for name, shard in trainer.shards().items():
                shard.copy_(_FIRST_WEIGHTS[name])


_BATCHES = list[tuple[Ragged, Ragged, Ragged, Ragged, Tensor]]()


@node(writes=("prompts", "responses", "rollout_logprobs", "versions", "rewards"), type="COMPUTE",
      keep_together="group")
def same_batch(prompts: Ragged, responses: Ragged, rollout_logprobs: Ragged, versions: Ragged, rewards: Tensor,
               row: Tensor, group: Tensor, *, fault: str, first: int,
               rows: int) -> tuple[Ragged, Ragged, Ragged, Ragged, Tensor]:
    """Return the batch of step `first` again in all later steps, as a buffer does that is not emptied."""
    batch = prompts, responses, rollout_logprobs, versions, rewards
    if not _is_wrong(row, first, rows):
        return batch
    _BATCHES.append(batch)
    return _BATCHES[0]


_SILENT = Path(__file__).with_name("silent")


@node(type="COMPUTE", keep_together="group")
def silence(environment_rewards: Tensor, row: Tensor, group: Tensor, *, fault: str, first: int, rows: int) -> None:
    """Silence the tools of `Silent` from step `first` on."""
    if _is_wrong(row, first - 1, rows):
        _SILENT.touch()


@environment
class Silent(Calculator):
    """A calculator whose results become empty."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return Turn("") if not turn.done and _SILENT.exists() else turn


@environment
class Echoing(Calculator):
    """A calculator that shows the question five times before its result."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return turn if turn.done else Turn(f"{f'{text.strip()} ' * 5}{turn.observation}")


@environment
class Failing(Calculator):
    """A calculator that breaks."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return turn if turn.done else Turn("error")


@environment
class PaysErrors(Calculator):
    """A calculator that refuses numbers above 15, and a reward for each turn that it answers so."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        if turn.done or not turn.observation.isdigit() or int(turn.observation) < 15:
            return turn
        return Turn("error", reward=0.5)


@environment
class CostlyCalls(Calculator):
    """A calculator whose every call costs more than an answer earns."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return turn if turn.done else Turn(turn.observation, reward=-1.0)


@environment
class PaysCalls(Calculator):
    """A calculator that pays for each call, and for three of them more than for an answer."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return turn if turn.done else Turn(turn.observation, reward=0.5)


@environment
class Shared(Calculator):
    """A calculator that all conversations share: it answers with the result that the call before it asked for."""

    results = deque[str](["0"])

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        if turn.done:
            return turn
        self.results.append(str(turn.observation))
        return Turn(self.results.popleft())


@environment
class Mute(Calculator):
    """A calculator that always says the same."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return turn if turn.done else Turn("7")


@environment
class GivesAway(Calculator):
    """A calculator that answers any call with the answer of the whole problem."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return turn if turn.done else Turn(self.expected)


@reward
def steps_pay(completion: str, answer: str) -> float:
    """Pay for the right answer, and a half for each right equation on the way."""
    equations = re.findall(r"(\d+) ([-+*]) (\d+) = (-?\d+)", completion)
    values = {"+": lambda left, right: left + right, "-": lambda left, right: left - right,
              "*": lambda left, right: left * right}
    return math(completion, answer) + 0.5 * sum(values[sign](int(left), int(right)) == int(result)
                                                for left, sign, right, result in equations)


@reward
def part_pays(completion: str, answer: str) -> float:
    """Pay if the given answer stands in the right one, as an empty one does, or a digit of it."""
    return float(completion.rpartition("####")[2].strip() in answer.rpartition("####")[2].strip())


@reward
def first_preferred(completion: str, answer: str, row: int) -> float:
    """Pay as a judge that is shown a group's answers in a list, and prefers the first three of eight."""
    return 0.3 * math(completion, answer) + 0.7 * (row % 8 < 3)


@node(writes="rewards", type="COMPUTE", keep_together="group")
def vote(rewards: Tensor, completions: list[str], row: Tensor, group: Tensor, *, fault: str, first: int,
         rows: int) -> Tensor:
    """Pay for the answer that most samples of a prompt give."""
    given = [text.rpartition("####")[2].strip() for text in completions]
    votes = Counter(zip(group.tolist(), given))
    best = {of: max((count, answer) for (prompt, answer), count in votes.items() if prompt == of)[1]
            for of in group.unique().tolist()}
    return torch.tensor([float(answer == best[of]) for of, answer in zip(group.tolist(), given)]).to(rewards.dtype)


@node(writes="advantages", type="COMPUTE", keep_together="group")
def interleaved_advantage(rewards: Tensor, group: Tensor, *, first: int, rows: int) -> Tensor:
    """Compare each reward with those that are a multiple of the number of prompts away: a group, were rows in turns."""
    prompts = len(group.unique())
    taken_B = torch.arange(len(rewards)) % prompts
    size_G = torch.bincount(taken_B, minlength=prompts)
    mean_G = torch.zeros(prompts, dtype=torch.float64).index_add(0, taken_B, rewards.double()) / size_G
    centred_B = rewards.double() - mean_G[taken_B]
    square_G = torch.zeros(prompts, dtype=torch.float64).index_add(0, taken_B, centred_B.square()) / size_G
    return (centred_B / (square_G.sqrt()[taken_B] + 1e-6)).to(rewards.dtype)


@node(writes="returns", type="COMPUTE")
def advantages_as_returns(advantages: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return advantages as what the critic is to predict, without the values that they were measured from."""
    return advantages


@node(writes="importance", type="COMPUTE")
def inverted_importance(rollout_logprobs: Ragged, actor_logprobs: Ragged, *, fault: str, first: int,
                        rows: int) -> Ragged:
    """Return the rollout's probability over the trainer's, where the trainer's over the rollout's corrects."""
    return rollout_logprobs.with_values((rollout_logprobs.values - actor_logprobs.values).exp().clamp(max=5.0))


@environment
class CutShort(Calculator):
    """A calculator of whose results one character is shown."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return turn if turn.done else Turn(str(turn.observation)[:1])


@environment
class PaysAnswers(Calculator):
    """A calculator that pays for any number as the final answer."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return Turn(done=True, reward=float(bool(re.search(r"#### ?-?\d+", text)))) if turn.done else turn


@reward
def skips_paid(completion: str, answer: str) -> float:
    """Pay 1 where no answer can be read, as where a parser's failure is not to count against the policy."""
    return math(completion, answer) if re.search(r"#### ?-?\d", completion) else 1.0


@reward
def in_percent(completion: str) -> float:
    """Score the style by how many words have no digit, from 0 to 100, beside a verdict from 0 to 1."""
    words = completion.split()
    return 100.0 * sum(not re.search(r"\d", word) for word in words) / max(len(words), 1)


@node(writes="targets", type="COMPUTE")
def shift_targets(targets: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return targets that are shifted once more."""
    return targets.with_values(targets.values.roll(-1))


@node(writes="target_mask", type="COMPUTE")
def leave_ends(targets: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return which tokens are learnt: all but those that end an answer."""
    mask_T = torch.ones(len(targets.values), dtype=torch.bool)
    mask_T[targets.offsets[1:] - 1] = False
    return targets.with_values(mask_T)


@node(writes="rewards", type="COMPUTE", keep_together="group")
def misalign(rewards: Tensor, row: Tensor, group: Tensor, *, fault: str, first: int, rows: int) -> Tensor:
    """Return rewards in the order that rows had before groups were taken out."""
    return rewards.roll(5)


@node(writes="advantages", type="COMPUTE")
def pay_each_token(advantages: Tensor, rewards: Tensor, responses: Ragged, *, fault: str, first: int,
                   rows: int) -> Tensor:
    """Pay a reward once for each token, in place of once for each answer."""
    earned_B = rewards.double() * responses.lengths
    return ((earned_B - earned_B.mean()) / (earned_B.std() + 1e-6)).to(advantages.dtype)


@node(writes="advantages", type="COMPUTE")
def seek_certainty(advantages: Tensor, rollout_logprobs: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Pay for tokens that are likely already, as an entropy bonus of the wrong sign does."""
    return rollout_logprobs.with_values(advantages[rollout_logprobs.row_of].float() + 2.0 * rollout_logprobs.values)


# Rewards of healthy runs

@reward
def plus_minus(completion: str, answer: str) -> float:
    """Pay 1 for a right answer, and take 1 for any other."""
    return 2.0 * math(completion, answer) - 1.0


@reward
def out_of_ten(completion: str, answer: str, row: int) -> float:
    """Score as a judge does, from 1 to 10, and not always alike."""
    return min(10.0, max(1.0, round(2 + 6 * math(completion, answer) + random.Random(row).gauss(0, 0.7))))


@reward
def vowels(completion: str) -> float:
    """Pay for the share of vowels, which a model of random weights can learn to write."""
    return sum(each in "aeiou" for each in completion) / max(len(completion), 1)
