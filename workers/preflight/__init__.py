"""Preflight: a run proves its inputs on its own first records, before it starts.

    data      `workers.preflight.data`      before torch is loaded, on rank 0
    rewards   `workers.preflight.rewards`   before torch is loaded, in processes of their own
    tokens    `workers.preflight.tokens`    in the first worker of rank 0, once its tokenizer is loaded; or `pictures`
    models    `workers.preflight.model`     in the first workers of all ranks that train, and after the first update

The head of each module lists what it proves. A proof that fails for every record that it was tried on ends the start
with the first of them; one that fails for some is a doubt, which is a note. `distflow validate --prove` runs all of
them without a run; `preflight: false` in the run file leaves them out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from distflow.config.spec import Spec
from workers.preflight.data import prove_data
from workers.preflight.proofs import Preflight, first_records
from workers.preflight.rewards import prove_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workers.encode import ImageEncoder


def prove_before_torch(account: Preflight, spec: Spec) -> None:
    """Prove data and rewards, and add that to the account."""
    sets = first_records(spec)
    count = sum(map(len, sets))
    account.prove("data", count, lambda: (failed for records in sets for failed in prove_data(records)))
    account.prove("rewards", count, lambda: prove_rewards(spec, sets))


def prove_with_tokenizer(account: Preflight, spec: Spec, tokenizer: PreTrainedTokenizerBase,
                         vocabulary: int | None, known_ends: Collection[int],
                         encoder: ImageEncoder | None = None) -> None:
    """Prove tokens, and add that to the account. `vocabulary`: the number of rows of the model's embedding, if known;
    `known_ends`: the model's own end tokens; `encoder`: of pictures, where records have some."""
    from workers.preflight.tokens import prove_pictures, prove_tokens

    sets = first_records(spec)
    if encoder:
        account.prove("pictures", sum(map(len, sets)), lambda: prove_pictures(spec, tokenizer, encoder, sets))
        return
    account.prove("tokens", sum(map(len, sets)), lambda: prove_tokens(
        spec, tokenizer, vocabulary, known_ends, sets))
