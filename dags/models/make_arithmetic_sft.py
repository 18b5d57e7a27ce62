"""Train the model that the default runs start from, `arithmetic_sft`, again: `make start-model`.

    python dags/models/make_arithmetic_sft.py     # rewrites the weights and the tokenizer in dags/models/arithmetic_sft

The model of `dags/runs/embedded_sft.yaml` starts from random weights and imitates the hasty teacher of
`dags/data/make_arithmetic.py`. Its tokenizer is that of a tiny architecture in the default run, so that a role with
random weights can learn from it. Weights are trained in float32 and rounded to bfloat16, which halves the files.
"""
import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import distflow
from distflow.config.load import load
from workers.engines.loading import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "arithmetic_sft")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch, "random")
        spec = load("sft", "embedded_sft", [f"seed={options.seed}", "data.train=arithmetic/train.jsonl"])
        model, tokenizer = load_model(spec, spec.run.roles["actor"].model)
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
        run = distflow.run("sft", set={"seed": options.seed, "roles.actor.model": str(start), "output": scratch},
                           ranks=2)
        run.wait()
        trained = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.bfloat16)
        trained.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {trained.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
