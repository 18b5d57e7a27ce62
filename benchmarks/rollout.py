"""Tokens per second of our rollout against the bare engine: transformers' `generate`, and vLLM's own `LLM.generate`.

The same model, prompts and number of samples; every row has all its tokens (there is no end token), so that both sides
generate equally many. Ours is `Rollout.generate`, with log-probabilities and versions; the bare side returns tokens
only. Run by hand:  python -m benchmarks.rollout   (with  --engine vllm  where vLLM is installed)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.group import on_ranks
from benchmarks.ratio import Spread, conclude, interleaved, least, options, parsed, ratios
from distflow.config.models import ROLLOUTS
from distflow.config.run import Generation, RoleRun
from distflow.data.batch import Ragged
from workers.engines import attention, engine_class
from workers.engines.embedded import build_model, build_tokenizer

GOAL = 0.95
NEVER = 511
"""An end token that no row draws: the model's vocabulary is smaller."""


def prompts_of(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 33, (count,), generator=draw).tolist()
    return [torch.randint(5, 260, (length,), generator=draw).tolist() for length in lengths]


def bare_transformers(model: PreTrainedModel, prompts: list[list[int]], samples: int, length: int) -> Callable[[], int]:
    """`generate` on one batch, padded on the left."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in prompts]).repeat_interleave(samples, 0)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts]).repeat_interleave(samples, 0)

    def work() -> int:
        done = model.generate(tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0,
                              max_new_tokens=length, eos_token_id=NEVER)
        return done[:, longest:].numel()

    return work


def bare_vllm(engine: Any, prompts: list[list[int]], samples: int, length: int) -> Callable[[], int]:
    """`LLM.generate` of an engine of its own, as `_bare_engine` starts it."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": row} for row in prompts]
    settings = SamplingParams(n=samples, temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
    return lambda: sum(len(each.token_ids) for output in engine.generate(asked, settings, use_tqdm=False)
                       for each in output.outputs)


def measure(name: str, sizes: dict[str, int], count: int, samples: int, length: int,
            repeats: int) -> list[dict[str, float]]:
    """Return the tokens per second of both sides."""
    tokenizer: PreTrainedTokenizerBase = build_tokenizer(["one"] * 3)
    model = build_model(500, 0, **sizes).eval()
    prompts = prompts_of(count)
    if name == "vllm":
        bare = bare_vllm(_bare_engine(model, tokenizer), prompts, samples, length)
    else:
        bare = bare_transformers(model, prompts, samples, length)
    mine = build_model(500, 0, **sizes)
    mine.set_attn_implementation(attention.NAME)
    settings = RoleRun(rollout=name, generation={"max_new_tokens": length})
    ours = engine_class(ROLLOUTS[name]).build(mine, tokenizer, settings, init_device_mesh("cpu", (1,)), 0, [NEVER])
    ragged, ids = Ragged.from_rows([torch.tensor(row) for row in prompts]), torch.arange(count * samples)
    sides = {"ours": lambda key: len(ours.generate(ragged, samples, ids, key).tokens.values), "bare": lambda _: bare()}
    wanted = count * samples * length
    return interleaved({side: lambda key, work=work: _speed(work, key, wanted) for side, work in sides.items()},
                       repeats + 1)[1:]


def _bare_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Start a bare engine with the cache, blocks, lengths and batches that ours has on a CPU. Ours differs in what it
    adds: its own draws, log-probabilities, and weights that arrive after the start."""
    import os
    import tempfile

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "VLLM_USE_V2_MODEL_RUNNER": "0"}
    from vllm import LLM

    from workers.engines.vllm.start import on_cpu

    generation = Generation()

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return LLM(model=folder, dtype="float32", seed=0, generation_config="vllm", enable_prefix_caching=True,
                   max_num_seqs=generation.batch_rows, max_num_batched_tokens=max(8192, generation.batch_rows),
                   async_scheduling=False, disable_log_stats=True, **on_cpu(model.config, generation, torch.float32))


def _speed(work: Callable[[int], int], key: int, wanted: int) -> float:
    start = time.perf_counter()
    made = work(key)
    if made != wanted:
        raise SystemExit(f"{made} tokens were generated instead of {wanted}")
    return made / (time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    given = parsed(parser, arguments)
    large = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4}
    sizes, length = ({"layers": 2}, 16) if given.quick else (large, 64)
    found = list[Spread]()
    for count, samples in ((16, 8), (64, 1)):
        pairs = on_ranks(1, measure, given.engine, sizes, count, samples, length, given.repeats)
        found.append(ratios(pairs, "ours", "bare", float))
        print(f"{count} prompts × {samples}: ours has {found[-1]} times the tokens per second of bare {given.engine}",
              flush=True)
    conclude(f"rollout by {given.engine} against the bare library, tokens per second, the worse of two kinds of rows",
             least(found), GOAL)


if __name__ == "__main__":
    main()
