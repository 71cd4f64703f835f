"""Names that other projects give to Quartet's settings, for hints in error messages."""

from __future__ import annotations

from types import MappingProxyType

_NAMES_BY_KEY = {
    "run.name": "run_name experiment_name wandb_run_name",
    "run.steps": "max_steps total_training_steps max_num_steps train_steps",
    "run.directory": "output_dir default_local_dir explicit_log_dir log_dir save_path",
    "data.prompts": "dataset_name dataset train_files prompt_data prompt_dataset train_dataset",
    "data.validation": "val_files eval_dataset validation_dataset",
    "data.truncation": "truncation_side truncation_mode",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len max_input_seq_length",
    "rollout.prompts_per_step": (
        "rollout_batch_size num_prompts_per_step batch_size generation_batch_size num_rollout_samples"
    ),
    "rollout.samples_per_prompt": (
        "n num_generations n_samples_per_prompt num_generations_per_prompt rollouts_per_example num_rollouts_per_prompt"
    ),
    "rollout.max_response_tokens": (
        "max_new_tokens response_length max_completion_length max_response_length generate_max_len max_tokens"
    ),
    "rollout.engine": "use_vllm",
    "rollout.router_replay": "enable_router_replay moe_router_replay enable_return_routed_experts",
    "rollout.stop_strings": "stop end_strings stop_token stop_sequences",
    "algorithm.estimator": "adv_estimator advantage_estimator",
    "algorithm.policy_loss": "loss_type policy_loss_type loss_mode importance_sampling_level use_cispo",
    "algorithm.policy_loss_parameters": (
        "sapo_temperature_pos sapo_temperature_neg tau_pos tau_neg clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio "
        "ppo_kl_coef"
    ),
    "algorithm.loss_divisor": "loss_scale_factor",
    "algorithm.estimator_parameters": (
        "scale_rewards norm_adv_by_std_in_grpo normalize_rewards use_leave_one_out_baseline"
    ),
    "algorithm.gamma": "discount_factor",
    "algorithm.gae_lambda": "lam lambd gae_lambda_policy",
    "algorithm.value_lambda": "gae_lambda_value",
    "algorithm.value_pretraining_steps": (
        "critic_warmup critic_warmup_steps freezing_steps policy_training_start_step"
    ),
    "algorithm.kl_coefficient": (
        "kl_coef kl_loss_coef kl_loss_coefficient init_kl_coef init_coef beta initial_policy_kl_penalty "
        "reference_policy_kl_penalty"
    ),
    "algorithm.kl_loss": "use_kl_loss use_loss",
    "algorithm.clip_ratio": "cliprange clip_range eps_clip epsilon ratio_eps clip_ratio_low ratio_clip_min dppo_mask_low",
    "algorithm.clip_ratio_high": "epsilon_high ratio_clip_max dppo_mask_high",
    "algorithm.dual_clip": "clip_ratio_c delta",
    "algorithm.old_log_probs": "bypass_mode use_decoupled_loss recompute_logprob",
    "algorithm.rollout_correction.level": (
        "rollout_is vllm_importance_sampling_correction is_correction_level use_importance_sampling_correction"
    ),
    "algorithm.rollout_correction.treatment": (
        "vllm_importance_sampling_mode is_correction_mode truncated_importance_sampling_type behave_imp_weight_mode"
    ),
    "algorithm.rollout_correction.upper": (
        "rollout_is_threshold vllm_importance_sampling_clip_max vllm_importance_sampling_cap is_correction_threshold "
        "truncated_importance_sampling_ratio behave_imp_weight_cap"
    ),
    "algorithm.rollout_correction.lower": ("vllm_importance_sampling_clip_min truncated_importance_sampling_ratio_min"),
    "algorithm.rollout_correction.normalize": "rollout_is_batch_normalize",
    "algorithm.rollout_correction.rejection": "rollout_rs rollout_rs_threshold rejection_sampling",
    "algorithm.rollout_correction.off_policy_mask": "off_policy_mask_threshold",
    "algorithm.value_clip": "cliprange_value vf_clip loss_clip_val",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef ent_coef",
    "algorithm.entropy_controller": "use_adaptive_entropy",
    "algorithm.entropy_controller.target": "entropy_target",
    "algorithm.entropy_controller.step_size": "entropy_coef_delta",
    "algorithm.entropy_controller.min_coefficient": "entropy_coef_min",
    "algorithm.entropy_controller.max_coefficient": "entropy_coef_max",
    "algorithm.num_epochs": "ppo_epochs num_ppo_epochs num_iterations max_epochs",
    "algorithm.loss_aggregation": "loss_agg_mode",
    "algorithm.score.clip": "reward_clip_range clip_range_reward",
    "actor.model": "model_name_or_path sft_model_path model_path pretrain",
    "actor.learning_rate": "lr learning_rate actor_learning_rate actor_lr",
    "critic.learning_rate": "critic_learning_rate critic_lr value_learning_rate",
    "actor.dtype": "torch_dtype bf16 fp16 precision param_dtype",
    "actor.warmup_steps": "lr_warmup_steps num_warmup_steps",
    "actor.schedule": "lr_scheduler_type lr_scheduler warmup_style",
    "actor.micro_batch_tokens": (
        "per_device_train_batch_size micro_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu "
        "ppo_max_token_len_per_gpu max_tokens_per_gpu"
    ),
    "actor.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing",
    "actor.compile": "torch_compile use_torch_compile",
    "actor.ema_decay": "ema_beta enable_ema",
    "actor.optimizer.kind": "optim optimizer_type optimizer_impl",
    "actor.optimizer.max_grad_norm": "max_grad_norm grad_clip clip_grad max_norm gradient_clip_val",
    "actor.optimizer.weight_decay": "weight_decay",
    "actor.lora.rank": "lora_rank lora_r r",
    "actor.lora.alpha": "lora_alpha",
    "actor.lora.rslora": "use_rslora",
    "actor.lora.dora": "use_dora",
    "actor.lora.dropout": "lora_dropout adapter_dropout",
    "actor.lora.learning_rate_ratio": "loraplus_lr_ratio",
    "reference.sync_steps": "sync_ref_model ref_model_sync_steps",
    "reference.sync_alpha": "ref_model_mixup_alpha",
    "reward.model": "reward_model_path reward_pretrain reward_model",
    "reward.function": "reward_funcs reward_function custom_reward_function",
    "reward.http.urls": "remote_rm_url remote_url rm_url",
    "reward.http.reward_key": "reward_key",
    "checkpoint.every_steps": "save_freq save_steps save_interval",
    "checkpoint.keep_last": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
    "checkpoint.best_metric": "metric_for_best_model best_metric_key metric_name",
    "checkpoint.best_mode": "greater_is_better best_metric_mode higher_is_better",
    "evaluation.every_steps": "test_freq eval_steps val_check_interval",
    "telemetry.wandb": "report_to use_wandb",
}
KEYS_BY_PEER_NAME = MappingProxyType({name: key for key, names in _NAMES_BY_KEY.items() for name in names.split()})
"""Setting by its name in TRL, verl, OpenRLHF, NeMo-Aligner, NeMo-RL, AReaL or prime-rl, without the sections before it.

Sources: the projects' config references, as cited in docs/hyperparameters.md.
"""
