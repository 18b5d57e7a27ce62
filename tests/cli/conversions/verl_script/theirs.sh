set -x
MODEL=${MODEL:-Qwen/Qwen3-8B}
n=5
# comments and options of the shell do not count
python3 -m verl.trainer.main_ppo --config-name ppo_trainer \
    algorithm.adv_estimator=grpo data.train_files="['train.jsonl']" data.val_files=heldout.jsonl \
    data.train_batch_size=100 data.max_response_length=64 actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=${n} +actor_rollout_ref.rollout.val_kwargs.n=4 trainer.test_freq=5 \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.top_p=0.95 \
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 trainer.save_freq=-1 trainer.rollout_data_dir=out \
    trainer.logger='["console","tensorboard"]' trainer.nnodes=1 trainer.n_gpus_per_node=2 \
    actor_rollout_ref.actor.entropy_coeff=0.001 actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
    trainer.total_epochs=15 data.filter_overlong_prompts=True data.truncation=error $@
