NODES=
long=$((16 * 4))
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    data.train_files=train.jsonl data.train_batch_size=8 data.max_response_length=$long \
    trainer.nnodes=$MACHINES_OF_NOBODY trainer.n_gpus_per_node=2 custom_reward_function.path=near.py
