"""Preflight: a run proves its inputs on its own first records, before it starts.

    data      `workers.preflight.data`      before torch is loaded, on rank 0
    rewards   `workers.preflight.rewards`   before torch is loaded, in processes of their own
    tokens    `workers.preflight.tokens`    in the first worker of rank 0, once its tokenizer is loaded

The head of each module lists what it proves. A proof that fails for every record that it was tried on ends the start
with the first of them; one that fails for some is a doubt, which is a note. `distflow validate --prove` runs all of
them without a run; `preflight: false` in the run file leaves them out.
"""

from __future__ import annotations

from distflow.config.load import Spec
from workers.preflight.data import prove_data
from workers.preflight.proofs import Preflight, first_records
from workers.preflight.rewards import prove_rewards


def prove_before_torch(spec: Spec) -> Preflight:
    """Prove data and rewards, unless the run file says otherwise. Raises InvalidInput: a proof has failed that is no
    doubt."""
    account = Preflight()
    if spec.run.preflight:
        sets = first_records(spec)
        account.prove("data", sum(map(len, sets)), lambda: (each for records in sets for each in prove_data(records)))
        account.prove("rewards", sum(map(len, sets)), lambda: prove_rewards(spec, sets))
    return account
