"""Examples at the end of each command's help. A test parses every one."""

EXAMPLES: dict[str, str] = {
    "demo": """
        distflow demo                                  # GRPO from the small model that is shipped
        distflow demo --sft                            # train this start too""",
    "validate": """
        distflow validate grpo                         # with the default run file
        distflow validate my_algo.yaml --run run.yaml --ranks 8""",
    "probe": """
        distflow probe --out my_machine.yaml           # for: distflow run grpo --cluster my_machine.yaml""",
    "plan": """
        distflow plan grpo --ranks 4
        distflow plan mixed grpo --cluster clusters/h200_a100.yaml --out placed.yaml""",
    "fit": """
        distflow fit grpo --cluster clusters/h200.yaml --set roles.actor.model=path/to/model
        distflow fit --from runs/grpo-1 --cluster my_machine.yaml     # as it has taken memory""",
    "run": """
        distflow run grpo                              # a tiny model, on this machine
        distflow run grpo --run my_run.yaml --ranks 8 --name first
        distflow run grpo --set steps=20 --set nodes.update.with.clip=0.1
        distflow run grpo --set mode=async --set groups.rollout=1 --ranks 2
        distflow run grpo --profile 10:12              # these steps, by the PyTorch profiler""",
    "resume": """
        distflow resume runs/grpo-1                    # as it was
        distflow resume runs/grpo-1 --ranks 4 --set steps=1000""",
    "store": """
        distflow store --host 10.0.0.5 --port 29400    # then on each machine: launch.py --store 10.0.0.5:29400""",
    "watch": """
        distflow watch runs/grpo-1""",
    "why": """
        distflow why runs/grpo-1                       # who holds it up now, or what ended it
        distflow why runs/grpo-1 --step 17             # what made this step as long as it was""",
    "log": """
        distflow log runs/grpo-1 --to wandb            # a run that has ended, all its steps
        distflow log runs/grpo-1 --to mlflow --follow""",
    "report": """
        distflow report runs/grpo-1
        distflow report runs/grpo-1 runs/grpo-2 --out both.html""",
    "trace": """
        distflow trace runs/grpo-1 --steps 10:14       # for ui.perfetto.dev
        distflow trace runs/grpo-1 --otlp http://127.0.0.1:4318/v1/traces""",
    "faults": """
        distflow faults runs/grpo-1""",
    "inject": """
        distflow inject runs/grpo-1 kill --rank 1      # its role starts again, and no other
        distflow inject runs/grpo-1 stop --rank 0""",
    "scale": """
        distflow scale runs/grpo-1 rollout=1""",
    "set": """
        distflow set runs/grpo-1 roles.actor.micro_batch_tokens=512""",
    "export": """
        distflow export runs/grpo-1 exported""",
    "evaluate": """
        distflow evaluate runs/grpo-1 --data math=heldout.jsonl --samples 8
        distflow evaluate path/to/model --run-file my_run.yaml --json""",
    "data": """
        distflow data grpo --run my_run.yaml           # records, filters, and validation questions that are trained""",
    "nodes": """
        distflow nodes                                 # one line each
        distflow nodes policy_update                   # what it reads, writes and accepts""",
    "engines": """
        distflow engines""",
    "new": """
        distflow new grpo my_algo                      # with a reward
        distflow new grpo_tools my_tools               # with an environment: turns with a tool""",
    "convert": """
        distflow convert run_qwen2.5_7b_grpo.sh        # a script that starts verl
        distflow convert grpo_config.yaml --out mine   # of TRL""",
    "schema": """
        distflow schema run > run.schema.json""",
    "completion": """
        distflow completion bash > ~/.local/share/bash-completion/completions/distflow""",
}
