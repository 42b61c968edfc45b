"""What each option of TRL and of verl is here: one table for `--from-trl`, for misspelt options and for docs/migrating.md.

The names and defaults are those of TRL 1.16.0 (GRPOConfig, ModelConfig and the arguments of `trl grpo`, on the
TrainingArguments of transformers 5.22 and 5.23) and of verl 0.9.1. No torch is imported here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VERSIONS = {"TRL": "1.16.0", "verl": "0.9.1"}


@dataclass(frozen=True, slots=True)
class Key:
    """The answer to one option of another trainer."""

    answer: str
    """"translated"; "no effect": nothing to set, results do not depend on it; "left out": told, not translated; "refused"."""
    default: Any
    """The other trainer's default."""
    ours: str
    """The path here; "" where there is none."""
    says: str
    """How the meaning differs, or what to do instead."""


def _table(answer: str, rows: Mapping[str, tuple[Any, str, str]]) -> dict[str, Key]:
    return {name: Key(answer, *row) for name, row in rows.items()}


_CLIP = "algorithm.objective.trust.clip"
_RANKS = "several GPUs are `legato train --processes N`, or torchrun (docs/scaling.md)"
_WHOLE_ENGINE = "each process samples with a whole model (docs/scaling.md)"
_SHARD = f'{_RANKS}, with training.shard = "optimizer" or "layers"'
_ENGINE = "Legato samples with its own engine from the weights that are trained"
_SERVERS = f'{_ENGINE}; rollouts.engine = "vllm" samples at vLLM servers instead (docs/engines.md)'
_EVERY_STEP = "every step is recorded"
_TRACKERS = "wandb: output.wandb; trackio: output.trackio; tensorboard: output.tensorboard"
_STORED = "rollouts are stored (output.rollouts_every_steps) and shown by `legato dashboard` and in the report"
_PADDING = "rows are packed without padding"
_DATA = "problems are drawn without a data loader"
_EXPORT = "`legato export RUN FOLDER` writes a folder that you can upload"

_TRL_TRANSLATED = {
    "learning_rate": (1e-6, "training.lr", "with policy.lora our default is 1e-5"),
    "lr_scheduler_type": ("linear", "training.schedule", "ours is constant by default; linear, cosine and constant exist"),
    "lr_scheduler_kwargs": (None, "training.final_lr_share", "min_lr_rate, or min_lr as a share of the learning rate"),
    "warmup_steps": (
        0,
        "training.warm_up_updates",
        "below 1 a share of all updates; the first update here has lr / n, not 0",
    ),
    "warmup_ratio": (0.0, "training.warm_up_updates", "a share of all updates"),
    "weight_decay": (0.0, "training.weight_decay", "on matrices only, as in TRL"),
    "adam_beta1": (0.9, "training.betas", "ours are 0.9 and 0.95 by default"),
    "adam_beta2": (0.999, "training.betas", "ours are 0.9 and 0.95 by default"),
    "adam_epsilon": (1e-8, "training.epsilon", "of Adam"),
    "max_grad_norm": (1.0, "training.gradient_clip", "the same"),
    "optim": ("adamw_torch_fused", "training.optimizer", "adamw, or adamw-8bit; others are refused"),
    "max_steps": (-1, "training.steps", "TRL counts updates, we count rollout steps: max_steps / updates per step"),
    "num_train_epochs": (3.0, "training.steps", "epochs x problems / training.prompts_per_step"),
    "per_device_train_batch_size": (8, "training.prompts_per_step", "TRL counts responses of one device, we count prompts"),
    "gradient_accumulation_steps": (
        1,
        "training.updates_per_step",
        "updates_per_step = steps_per_generation / gradient_accumulation_steps. Memory has its own option,"
        " training.tokens_per_pack, which changes no result",
    ),
    "steps_per_generation": (
        None,
        "training.updates_per_step",
        "updates_per_step = steps_per_generation / gradient_accumulation_steps; unset it is 1, and every ratio is 1",
    ),
    "generation_batch_size": (None, "training.prompts_per_step", "generation_batch_size / num_generations prompts a step"),
    "num_generations": (8, "rollouts.samples_per_prompt", "the same"),
    "num_iterations": (1, "training.epochs_per_step", "the same"),
    "max_completion_length": (512, "rollouts.max_response_tokens", "the same"),
    "max_prompt_length": (None, "policy.max_prompt_tokens", "TRL 1.16 has no limit and older versions cut; we leave out"),
    "temperature": (1.0, "rollouts.temperature", "the same"),
    "top_p": (1.0, "rollouts.top_p", "the same; log-probs are of the whole distribution in both"),
    "top_k": (0, "rollouts.top_k", "the same"),
    "min_p": (None, "rollouts.min_p", "the same"),
    "chat_template_kwargs": (None, "policy.chat_template_kwargs", "the same"),
    "beta": (
        0.0,
        "algorithm.objective.penalties.kl.beta",
        "with use_bias_correction_kl, TRL's default, objective.penalties.kl-ratio-weighted.beta",
    ),
    "use_bias_correction_kl": (
        True,
        "algorithm.objective.penalties.kl-ratio-weighted.beta",
        "weighs the KL of a token by its ratio; at sequence level TRL takes the ratio of the response, we the token's",
    ),
    "epsilon": (0.2, f"{_CLIP}.low", "for a sequence ratio the paper has 3e-4; 0.2 never clips there"),
    "epsilon_high": (None, f"{_CLIP}.high", "unset: as epsilon. For a sequence ratio the paper has 4e-4; a cap for cispo"),
    "delta": (None, "algorithm.objective.trust.dual-clip.cap", "the same"),
    "importance_sampling_level": (
        "token",
        "algorithm.objective.ratio.level",
        "sequence: algorithm=gspo; token: algorithm=grpo",
    ),
    "loss_type": (
        "dapo",
        "algorithm.aggregate",
        "grpo: sequence-mean (the papers of GRPO and GSPO); dapo, bnpo: token-mean; dr_grpo: sequence-sum-over-constant;"
        " luspo, cispo, sapo, vespo: algorithms of these names",
    ),
    "scale_rewards": (
        "group",
        "algorithm.advantage",
        "group: group-z with ddof 1 and epsilon 1e-4 (ours: 0 and 1e-6); batch: group-centre-batch-std; none: group-centre",
    ),
    "multi_objective_aggregation": ("sum_then_normalize", "algorithm.advantage", "normalize_then_sum: gdpo"),
    "reward_weights": (None, "reward.components.NAME.weight", "one for each reward of the list"),
    "reward_funcs": (None, "reward.kind", "file.py:name; several: reward.components.NAME.kind"),
    "sapo_temperature_neg": (1.05, "algorithm.objective.trust.soft-gate.tau_negative", "with loss_type = 'sapo'"),
    "sapo_temperature_pos": (1.0, "algorithm.objective.trust.soft-gate.tau_positive", "with loss_type = 'sapo'"),
    "vespo_k_pos": (2.0, "algorithm.objective.trust.kernel.power_positive", "with loss_type = 'vespo'"),
    "vespo_lambda_pos": (3.0, "algorithm.objective.trust.kernel.rate_positive", "with loss_type = 'vespo'"),
    "vespo_k_neg": (3.0, "algorithm.objective.trust.kernel.power_negative", "with loss_type = 'vespo'"),
    "vespo_lambda_neg": (2.0, "algorithm.objective.trust.kernel.rate_negative", "with loss_type = 'vespo'"),
    "mask_truncated_completions": (False, "algorithm.filters", "['overlong']: rewards stay in the baseline, as in TRL"),
    "top_entropy_quantile": (1.0, "algorithm.objective.trust.high-entropy.fraction", "over the update, not the micro-batch"),
    "entropy_coef": (0.0, "algorithm.objective.penalties.entropy.coefficient", "the same"),
    "use_adaptive_entropy": (False, "algorithm.objective.penalties.adaptive-entropy.target", "starts at coefficient 0"),
    "entropy_coef_max": (1.0, "algorithm.objective.penalties.adaptive-entropy.cap", "with use_adaptive_entropy"),
    "entropy_coef_delta": (0.005, "algorithm.objective.penalties.adaptive-entropy.step", "with use_adaptive_entropy"),
    "entropy_target": (0.2, "algorithm.objective.penalties.adaptive-entropy.target", "with use_adaptive_entropy"),
    "off_policy_mask_threshold": (None, "algorithm.objective.trust.opsm.threshold", "the same"),
    "vllm_importance_sampling_correction": (
        True,
        "algorithm.objective.corrections",
        "only with use_vllm: mis or tis, by vllm_importance_sampling_mode. Our engine samples from the trained weights, so"
        " the weights are close to 1",
    ),
    "vllm_importance_sampling_mode": (
        "sequence_mask",
        "algorithm.objective.corrections",
        "sequence_mask: mis at level product; token_mask: mis at level token; *_truncate: tis",
    ),
    "vllm_importance_sampling_clip_max": (3.0, "algorithm.objective.corrections.mis.cap", "or of tis"),
    "vllm_importance_sampling_cap": (None, "algorithm.objective.corrections.mis.cap", "TRL's old name of clip_max"),
    "vllm_importance_sampling_clip_min": (None, "algorithm.objective.corrections.icepop.floor", "mask modes: icepop"),
    "use_vllm": (False, "algorithm.objective.corrections", f"{_SERVERS}; with use_vllm TRL's correction is added"),
    "vllm_max_model_length": (None, "policy.max_prompt_tokens", "less max_completion_length"),
    "router_aux_loss_coef": (None, "training.load_balance", "ours is 1 where the load is even; scale it when you compare"),
    "shuffle_dataset": (True, "task.shuffle", "the same; the order itself differs"),
    "seed": (42, "training.seed", "ours is 0 by default; equal seeds give other numbers than in TRL"),
    "num_generations_eval": (None, "evaluation.samples_per_problem", "responses for each held-out problem"),
    "eval_strategy": ("no", "evaluation.every_steps", "no: 0, which still evaluates before the first step and at the end"),
    "eval_steps": (None, "evaluation.every_steps", "TRL counts updates, we count steps"),
    "save_strategy": ("steps", "output.checkpoint_every_steps", "no: 0, which still saves at the end"),
    "save_steps": (500, "output.checkpoint_every_steps", "TRL counts updates, we count steps"),
    "save_total_limit": (None, "output.keep_last", "unset TRL keeps all; we keep 2 and the best"),
    "output_dir": (None, "output.directory", "TRL's folder of the run: output.directory/output.name"),
    "run_name": (None, "output.name", "the folder of the run, and its name in W&B"),
    "report_to": ("none", "output.wandb", _TRACKERS),
    "project": ("huggingface", "output.project", "of W&B"),
    "bf16": (
        None,
        "policy.dtype",
        "auto: bfloat16 weights with float32 masters on a GPU; TRL has float32 weights under autocast",
    ),
    "use_cpu": (False, "policy.device", "cpu"),
    "trust_remote_code": (False, "policy.trust_remote_code", "the same"),
    "model_init_kwargs": (
        None,
        "policy.dtype",
        "dtype and trust_remote_code; attention needs no choice; others are refused",
    ),
    "model_name_or_path": (None, "policy.model", "the same"),
    "dtype": ("float32", "policy.dtype", "auto, bfloat16, float32; ours has float32 masters in any case"),
    "use_peft": (False, "policy.lora", "policy.lora=true"),
    "lora_r": (16, "policy.lora.rank", "the same"),
    "lora_alpha": (32, "policy.lora.alpha", "ours is twice the rank by default"),
    "lora_target_modules": (
        None,
        "policy.lora.targets",
        "unset: every linear layer here; peft's choice for the model in TRL",
    ),
    "dataset_name": (None, "task.dataset", "with task.kind=dataset; or task.kind=jsonl task.path=FILE"),
    "dataset_config": (None, "task.config", "with task.kind=dataset"),
    "dataset_train_split": ("train", "task.split", "with task.kind=dataset"),
}

_TRL_NO_EFFECT = {
    "disable_dropout": (False, "", "dropout is always off here"),
    "cast_lm_head_to_fp32": (False, "", "log-probs are always float32 or better"),
    "remove_unused_columns": (False, "", "a reward always gets every column"),
    "pad_to_multiple_of": ("auto", "", _PADDING),
    "gradient_checkpointing": (True, "policy.gradient_checkpointing", "auto: where activations do not fit; the same result"),
    "gradient_checkpointing_kwargs": (None, "policy.gradient_checkpointing", "auto"),
    "activation_checkpointing": (True, "policy.gradient_checkpointing", "the name of transformers 5.23; auto"),
    "activation_checkpointing_kwargs": (None, "policy.gradient_checkpointing", "auto"),
    "cache_implementation": (None, "", _ENGINE),
    "use_cache": (False, "", _ENGINE),
    "vllm_mode": ("colocate", "rollouts.engine", _SERVERS),
    "vllm_model_impl": ("vllm", "", _ENGINE),
    "vllm_device": ("auto", "", f"{_ENGINE}; an option of older versions"),
    "vllm_dtype": ("auto", "", f"{_ENGINE}; an option of older versions"),
    "vllm_enable_prefix_caching": (True, "", "a group's prompt is computed once; an option of older versions"),
    "vllm_enable_sleep_mode": (False, "", _ENGINE),
    "vllm_server_base_url": (None, "rollouts.servers.urls", _SERVERS),
    "vllm_server_host": ("0.0.0.0", "rollouts.servers.urls", _SERVERS),
    "vllm_server_port": (8000, "rollouts.servers.urls", _SERVERS),
    "vllm_server_timeout": (240.0, "rollouts.servers.start_seconds", _SERVERS),
    "vllm_group_port": (51216, "", _ENGINE),
    "vllm_gpu_memory_utilization": (0.3, "rollouts.kv_memory_share", "memory for keys and values"),
    "vllm_tensor_parallel_size": (1, "", _WHOLE_ENGINE),
    "use_transformers_continuous_batching": (False, "", _ENGINE),
    "transformers_continuous_batching_config": (None, "", _ENGINE),
    "use_transformers_paged": (False, "", _ENGINE),
    "log_completions": (False, "output.rollouts_every_steps", _STORED),
    "log_multimodal": (True, "", "texts only"),
    "num_completions_to_print": (None, "", _STORED),
    "log_unique_prompts": (False, "", _STORED),
    "logging_strategy": ("steps", "", _EVERY_STEP),
    "logging_steps": (10, "", _EVERY_STEP),
    "logging_first_step": (False, "", _EVERY_STEP),
    "logging_nan_inf_filter": (True, "", "NaN is recorded as NaN, and `legato doctor` reports it"),
    "logging_dir": (None, "output.directory", "TensorBoard files lie in the run directory"),
    "log_on_each_node": (True, "", _EVERY_STEP),
    "log_level": ("passive", "", _EVERY_STEP),
    "log_level_replica": ("warning", "", _EVERY_STEP),
    "include_num_input_tokens_seen": ("no", "", "tokens are always counted"),
    "disable_tqdm": (None, "", "no progress bar"),
    "ds3_gather_for_generation": (True, "", _RANKS),
    "average_tokens_across_devices": (True, "", _RANKS),
    "bf16_full_eval": (False, "", "evaluations use the engine of the rollouts"),
    "fp16_full_eval": (False, "", "evaluations use the engine of the rollouts"),
    "tf32": (None, "", "products are float32 or bfloat16"),
    "torch_compile": (False, "", "kernels are fused where that is faster"),
    "torch_compile_backend": (None, "", "kernels are fused where that is faster"),
    "torch_compile_mode": (None, "", "kernels are fused where that is faster"),
    "use_liger_kernel": (False, "", "kernels are fused where that is faster"),
    "liger_kernel_config": (None, "", "kernels are fused where that is faster"),
    "attn_implementation": (None, "", "attention over packs is chosen and checked when the model is loaded"),
    "torch_empty_cache_steps": (None, "", "memory is planned before the run"),
    "auto_find_batch_size": (False, "training.tokens_per_pack", "packs are cut to fit the memory"),
    "per_device_eval_batch_size": (8, "rollouts.rows_at_once", "memory only"),
    "eval_accumulation_steps": (None, "", "memory only"),
    "eval_on_start": (False, "", "the policy is always evaluated before the first step"),
    "eval_do_concat_batches": (True, "", "evaluation measures accuracy, with intervals"),
    "eval_use_gather_object": (False, "", _RANKS),
    "prediction_loss_only": (False, "", "evaluation measures accuracy, with intervals"),
    "include_for_metrics": ([], "", "evaluation measures accuracy, with intervals"),
    "batch_eval_metrics": (False, "", "evaluation measures accuracy, with intervals"),
    "save_only_model": (False, "", "a checkpoint always holds what `legato resume` needs"),
    "save_on_each_node": (False, "", _RANKS),
    "save_safetensors": (True, "", "weights are always safetensors"),
    "overwrite_output_dir": (False, "output.name", "an existing run is never overwritten: choose another name"),
    "enable_jit_checkpoint": (False, "", "SIGTERM saves and ends the run; SIGUSR2 saves and goes on"),
    "load_best_model_at_end": (False, "", "the best checkpoint is kept beside the newest"),
    "ignore_data_skip": (False, "", "`legato resume` goes on at the right problem"),
    "restore_callback_states_from_checkpoint": (False, "", "`legato resume` restores everything"),
    "full_determinism": (False, "", "on a CPU runs are equal to the bit in any case"),
    "accelerator_config": (None, "", _RANKS),
    "ddp_find_unused_parameters": (None, "", _RANKS),
    "ddp_bucket_cap_mb": (None, "", _RANKS),
    "ddp_broadcast_buffers": (None, "", _RANKS),
    "ddp_static_graph": (None, "", _RANKS),
    "ddp_backend": (None, "", _RANKS),
    "ddp_timeout": (1800, "", _RANKS),
    "local_rank": (-1, "", _RANKS),
    "dataloader_drop_last": (False, "", _DATA),
    "dataloader_num_workers": (0, "", _DATA),
    "dataloader_pin_memory": (True, "", _DATA),
    "dataloader_persistent_workers": (False, "", _DATA),
    "dataloader_prefetch_factor": (None, "", _DATA),
    "dataloader_multiprocessing_context": (None, "", _DATA),
    "dataloader_in_order": (True, "", _DATA),
    "length_column_name": ("length", "", _DATA),
    "label_names": (None, "", "GRPO has no labels"),
    "label_smoothing_factor": (0.0, "", "GRPO has no labels"),
    "debug": ("", "", "the run directory holds what is needed"),
    "skip_memory_metrics": (True, "", "memory is always measured"),
    "do_train": (False, "", "the verb says it: legato train"),
    "do_eval": (False, "", "the verb says it: legato eval"),
    "do_predict": (False, "", "the verb says it: legato sample"),
    "dataset_test_split": ("test", "task.held_out_share", "held-out problems come from the same data"),
    "ignore_bias_buffers": (False, "", _RANKS),
    "lora_task_type": ("CAUSAL_LM", "", "always CAUSAL_LM"),
    "bnb_4bit_quant_type": ("nf4", "", "only with load_in_4bit"),
    "use_bnb_nested_quant": (False, "", "only with load_in_4bit"),
    "bnb_4bit_quant_storage": (None, "", "only with load_in_4bit"),
    "ref_model_mixup_alpha": (0.6, "", "only with sync_ref_model"),
    "ref_model_sync_steps": (512, "", "only with sync_ref_model"),
    "entropy_coef_min": (0.0, "", "only with use_adaptive_entropy; ours is bounded by 0 below"),
}

_TRL_LEFT_OUT = {
    "lora_dropout": (
        0.05,
        "",
        "adapters have no dropout here: a ratio compares two passes, which must not differ by chance",
    ),
    "data_seed": (None, "training.seed", "one seed decides everything random"),
    "train_sampling_strategy": ("random", "task.shuffle", "problems are shuffled, or taken in order"),
    "group_by_length": (False, "", "rows are packed, lengths need no grouping"),
    "fp16": (False, "policy.dtype", "there is no float16: bfloat16 with float32 masters is used"),
    "eval_delay": (0, "evaluation.every_steps", "evaluations begin before the first step"),
    "metric_for_best_model": (None, "", "the best checkpoint is that of the highest held-out accuracy"),
    "greater_is_better": (None, "", "the best checkpoint is that of the highest held-out accuracy"),
    "resume_from_checkpoint": (
        None,
        "",
        "`legato resume RUN` goes on with a run of ours; checkpoints of TRL cannot be resumed",
    ),
    "push_to_hub": (False, "", _EXPORT),
    "hub_token": (None, "", _EXPORT),
    "hub_private_repo": (None, "", _EXPORT),
    "hub_model_id": (None, "", _EXPORT),
    "hub_strategy": ("every_save", "", _EXPORT),
    "hub_always_push": (False, "", _EXPORT),
    "hub_revision": (None, "", _EXPORT),
    "log_completions_hub_repo": (None, "output.rollouts_every_steps", _STORED),
    "trackio_space_id": (None, "", "name the project in output.project"),
    "trackio_bucket_id": (None, "", "name the project in output.project"),
    "trackio_static_space_id": (None, "", "name the project in output.project"),
    "parallelism_config": (None, "training.shard", f"{_SHARD}; training.offload_optimizer and policy.lora save memory"),
    "fsdp": (None, "training.shard", f"{_SHARD}; training.offload_optimizer and policy.lora save memory"),
    "fsdp_config": (None, "training.shard", f"{_SHARD}; training.offload_optimizer and policy.lora save memory"),
    "deepspeed": (None, "training.shard", f"{_SHARD}; training.offload_optimizer and policy.lora save memory"),
    "max_tool_calling_iterations": (None, "task.environment", "tools are an environment here: docs/environments.md"),
    "dataset_streaming": (False, "", "the data set is loaded whole"),
    "streaming": (False, "", "the data set is loaded whole"),
    "test_split_size": (None, "task.held_out_share", "the share of held-out problems"),
}

_TRL_REFUSED: dict[str, tuple[Any, str, str]] = {
    "repetition_penalty": (1.0, "", "the log-probs of a penalised sampler are not those of the policy; drop it"),
    "generation_kwargs": (None, "rollouts.stop", "temperature, top_p, top_k, min_p and stop have options under rollouts"),
    "vllm_structured_outputs_regex": (
        None,
        "reward.kind",
        "there is no constrained decoding; reward the form with 'format'",
    ),
    "sync_ref_model": (False, "", "the reference stays fixed here; drop it"),
    "neftune_noise_alpha": (None, "", "noise on embeddings would change every ratio; drop it"),
    "optim_args": (None, "training.betas", "the options of AdamW stand under training"),
    "optim_target_modules": (None, "policy.frozen", "name the parameters that are not trained"),
    "lora_target_parameters": (None, "policy.lora.targets", "adapters stand on modules"),
    "lora_modules_to_save": (None, "policy.lora.targets", "only adapters are trained"),
    "use_rslora": (False, "policy.lora.alpha", "set alpha; adapters are scaled by alpha / rank"),
    "use_dora": (False, "policy.lora", "plain LoRA exists"),
    "load_in_8bit": (False, "policy.dtype", "weights are bfloat16, float32 or float64"),
    "load_in_4bit": (False, "policy.dtype", "weights are bfloat16, float32 or float64"),
    "model_revision": ("main", "policy.model", "download that revision and name its folder"),
    "reward_model_name_or_path": (None, "reward.kind", "write a batched reward that calls the model: docs/extending.md"),
    "datasets": ([], "task.kind", "one data set, or two stages with task.second"),
}

TRL: dict[str, Key] = {
    **_table("translated", _TRL_TRANSLATED),
    **_table("no effect", _TRL_NO_EFFECT),
    **_table("left out", _TRL_LEFT_OUT),
    **_table("refused", _TRL_REFUSED),
}
"""Every option of TRL's GRPO: name -> what it is here."""

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

_VERL_TRANSLATED = {
    "algorithm.adv_estimator": (
        "gae",
        "algorithm.advantage",
        "grpo: group-z with advantage.ddof=1; rloo: leave-one-out; reinforce_plus_plus: batch-z; gae: algorithm=ppo;"
        " opo: length-weighted; gpg, remax and others have no counterpart",
    ),
    "algorithm.norm_adv_by_std_in_grpo": (True, "algorithm.advantage", "true: group-z; false: group-centre (Dr. GRPO)"),
    "algorithm.gamma": (1.0, "algorithm.advantage.gamma", "with advantage = 'gae'"),
    "algorithm.lam": (1.0, "algorithm.advantage.lam", "with advantage = 'gae'; ours is 0.95 by default"),
    "algorithm.use_kl_in_reward": (False, "algorithm.advantage.reward_kl", "the coefficient itself; absent in group-z"),
    "algorithm.kl_ctrl.kl_coef": (0.001, "algorithm.advantage.reward_kl", "only with use_kl_in_reward"),
    "algorithm.filter_groups.enable": (False, "task.resampling", "dynamic (DAPO)"),
    "algorithm.filter_groups.max_num_gen_batches": (0, "task.max_refills", "0 is no limit in verl; ours is 8"),
    "algorithm.rollout_correction.rollout_is": (None, "algorithm.objective.corrections.tis.cap", "level token or product"),
    "algorithm.rollout_correction.rollout_is_threshold": (2.0, "algorithm.objective.corrections.tis.cap", "the cap"),
    "algorithm.rollout_correction.rollout_rs": (
        None,
        "algorithm.objective.corrections.geo-rejection.cap",
        "or k3-rejection",
    ),
    f"{_ACTOR}.policy_loss.loss_mode": (
        "vanilla",
        "algorithm.name",
        "gspo: gspo; vanilla: grpo with objective.trust.dual-clip.cap=3; geo_mean: gmpo; cispo, sapo: the same names;"
        " dppo_tv, dppo_kl: dppo; clip_cov, kl_cov: parts clip-cov and kl-cov",
    ),
    f"{_ACTOR}.clip_ratio": (0.2, f"{_CLIP}.low", "and .high"),
    f"{_ACTOR}.clip_ratio_low": (0.2, f"{_CLIP}.low", "for a sequence ratio the paper has 3e-4; 0.2 never clips there"),
    f"{_ACTOR}.clip_ratio_high": (0.2, f"{_CLIP}.high", "for a sequence ratio the paper has 4e-4"),
    f"{_ACTOR}.clip_ratio_c": (3.0, "algorithm.objective.trust.dual-clip.cap", "always on in verl, a part to add here"),
    f"{_ACTOR}.loss_agg_mode": (
        "token-mean",
        "algorithm.aggregate",
        "token-mean: token-mean; seq-mean-token-mean: sequence-mean, as in the papers of GRPO and GSPO; seq-mean-token-sum:"
        " sequence-sum; seq-mean-token-sum-norm: sequence-sum-over-constant",
    ),
    f"{_ACTOR}.entropy_coeff": (0, "algorithm.objective.penalties.entropy.coefficient", "the same"),
    f"{_ACTOR}.use_kl_loss": (False, "algorithm.objective.penalties.kl.beta", "the coefficient itself"),
    f"{_ACTOR}.kl_loss_coef": (0.001, "algorithm.objective.penalties.kl.beta", "only with use_kl_loss"),
    f"{_ACTOR}.kl_loss_type": (
        "low_var_kl",
        "algorithm.objective.penalties.kl.estimator",
        "low_var_kl: k3; mse: k2; kl: k1",
    ),
    f"{_ACTOR}.tau_pos": (1.0, "algorithm.objective.trust.soft-gate.tau_positive", "with sapo"),
    f"{_ACTOR}.tau_neg": (1.05, "algorithm.objective.trust.soft-gate.tau_negative", "with sapo"),
    f"{_ACTOR}.ppo_mini_batch_size": (
        256,
        "training.updates_per_step",
        "updates_per_step = data.train_batch_size / ppo_mini_batch_size; verl counts prompts in both",
    ),
    f"{_ACTOR}.ppo_epochs": (1, "training.epochs_per_step", "the same"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": (16384, "training.tokens_per_pack", "memory only; it changes no result"),
    f"{_ACTOR}.optim.lr": (1e-6, "training.lr", "with policy.lora our default is 1e-5"),
    f"{_ACTOR}.optim.weight_decay": (0.01, "training.weight_decay", "ours is 0 by default"),
    f"{_ACTOR}.optim.betas": ([0.9, 0.999], "training.betas", "ours are 0.9 and 0.95 by default"),
    f"{_ACTOR}.optim.clip_grad": (1.0, "training.gradient_clip", "the same"),
    f"{_ACTOR}.grad_clip": (1.0, "training.gradient_clip", "the same"),
    f"{_ACTOR}.optim.lr_scheduler_type": ("constant", "training.schedule", "constant or cosine"),
    f"{_ACTOR}.optim.warmup_style": (None, "training.schedule", "verl's old name of lr_scheduler_type"),
    f"{_ACTOR}.optim.min_lr_ratio": (0.0, "training.final_lr_share", "the same"),
    f"{_ACTOR}.optim.lr_warmup_steps": (-1, "training.warm_up_updates", "verl counts steps, we count updates"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": (0.0, "training.warm_up_updates", "a share of all steps in verl"),
    f"{_ACTOR}.fsdp_config.optimizer_offload": (False, "training.offload_optimizer", "the same"),
    f"{_ACTOR}.router_replay.mode": ("disabled", "training.routing_replay", "R2 or R3"),
    f"{_ROLLOUT}.n": (1, "rollouts.samples_per_prompt", "the same"),
    f"{_ROLLOUT}.temperature": (1.0, "rollouts.temperature", "the same"),
    f"{_ROLLOUT}.top_p": (1.0, "rollouts.top_p", "the same"),
    f"{_ROLLOUT}.top_k": (-1, "rollouts.top_k", "0 is no limit here, -1 in verl"),
    f"{_ROLLOUT}.response_length": (512, "rollouts.max_response_tokens", "the same"),
    f"{_ROLLOUT}.prompt_length": (512, "policy.max_prompt_tokens", "ours is 256 by default"),
    f"{_ROLLOUT}.val_kwargs.n": (1, "evaluation.samples_per_problem", "the same"),
    f"{_ROLLOUT}.val_kwargs.temperature": (0, "evaluation.temperature", "greedy accuracy: evaluation.greedy"),
    f"{_ROLLOUT}.name": ("vllm", "rollouts.engine", _SERVERS),
    f"{_ROLLOUT}.gpu_memory_utilization": (0.5, "rollouts.kv_memory_share", "memory for keys and values"),
    f"{_ROLLOUT}.max_num_seqs": (256, "rollouts.rows_at_once", "memory only"),
    f"{_MODEL}.path": (None, "policy.model", "the same"),
    f"{_MODEL}.lora_rank": (0, "policy.lora.rank", "0 is no LoRA in verl; here policy.lora is absent"),
    f"{_MODEL}.lora_alpha": (16, "policy.lora.alpha", "ours is twice the rank by default"),
    f"{_MODEL}.target_modules": ("all-linear", "policy.lora.targets", "empty: every linear layer"),
    f"{_MODEL}.trust_remote_code": (False, "policy.trust_remote_code", "the same"),
    f"{_MODEL}.enable_gradient_checkpointing": (True, "policy.gradient_checkpointing", "auto: where activations do not fit"),
    "data.train_files": (None, "task.path", "with task.kind=parquet, task.prompt and task.answer"),
    "data.val_files": (None, "task.held_out_share", "held-out problems come from the same data"),
    "data.prompt_key": ("prompt", "task.prompt", "the same"),
    "data.train_batch_size": (1024, "training.prompts_per_step", "the same: verl counts prompts here"),
    "data.max_prompt_length": (512, "policy.max_prompt_tokens", "ours is 256 by default"),
    "data.max_response_length": (512, "rollouts.max_response_tokens", "ours is 64 by default"),
    "data.filter_overlong_prompts": (False, "policy.too_long", "drop"),
    "data.truncation": ("error", "policy.too_long", "error; prompts are never cut"),
    "data.shuffle": (True, "task.shuffle", "the same"),
    "data.seed": (None, "training.seed", "one seed decides everything random"),
    "data.apply_chat_template_kwargs": ({}, "policy.chat_template_kwargs", "the same"),
    "reward.custom_reward_function.path": (None, "reward.kind", "file.py:name; a reward gets a rollout, or TRL's arguments"),
    "reward.custom_reward_function.name": ("compute_score", "reward.kind", "file.py:name"),
    "custom_reward_function.path": (None, "reward.kind", "file.py:name; a reward gets a rollout, or TRL's arguments"),
    "custom_reward_function.name": (None, "reward.kind", "file.py:name"),
    "critic.optim.lr": (1e-5, "training.value_lr", "with algorithm=ppo"),
    "critic.cliprange_value": (0.5, "algorithm.objective.penalties.value.clip", "with algorithm=ppo"),
    "trainer.total_epochs": (30, "training.steps", "epochs x problems / training.prompts_per_step"),
    "trainer.total_training_steps": (None, "training.steps", "both count rollout steps"),
    "trainer.save_freq": (-1, "output.checkpoint_every_steps", "0 saves at the end only; -1 never saves in verl"),
    "trainer.test_freq": (-1, "evaluation.every_steps", "0 evaluates before the first step and at the end"),
    "trainer.max_actor_ckpt_to_keep": (None, "output.keep_last", "unset verl keeps all; we keep 2 and the best"),
    "trainer.project_name": ("verl_examples", "output.project", "of W&B"),
    "trainer.experiment_name": ("gsm8k", "output.name", "the folder of the run"),
    "trainer.default_local_dir": (None, "output.directory", "the folder of all runs"),
    "trainer.logger": (["console", "wandb"], "output.wandb", _TRACKERS),
    "trainer.rollout_data_dir": (None, "output.rollouts_every_steps", _STORED),
}

_VERL_LEFT_OUT = {
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": (None, "training.tokens_per_pack", "packs are cut to fit the memory"),
    f"{_ACTOR}.use_dynamic_bsz": (False, "training.tokens_per_pack", "rows are always packed by tokens"),
    f"{_ACTOR}.shuffle": (False, "", "groups of a step are divided in order"),
    f"{_ACTOR}.fsdp_config.param_offload": (
        False,
        "training.offload_optimizer",
        "moments and masters on the host; weights stay on the GPU",
    ),
    f"{_ROLLOUT}.tensor_model_parallel_size": (2, "", _WHOLE_ENGINE),
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": (None, "training.tokens_per_pack", "packs are cut to fit the memory"),
    f"{_ROLLOUT}.multi_turn.enable": (False, "task.environment", "docs/environments.md"),
    f"{_ROLLOUT}.calculate_log_probs": (True, "", "the engine always returns log-probs"),
    f"{_MODEL}.use_remove_padding": (True, "policy.packing", "rows are packed without padding by default"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (None, "training.tokens_per_pack", "packs fit the memory"),
    "actor_rollout_ref.hybrid_engine": (True, "", _ENGINE),
    "algorithm.kl_ctrl.type": ("fixed", "algorithm.advantage.reward_kl", "the coefficient stays fixed"),
    "algorithm.kl_ctrl.horizon": (10000, "algorithm.advantage.reward_kl", "the coefficient stays fixed"),
    "algorithm.kl_ctrl.target_kl": (0.1, "algorithm.advantage.reward_kl", "the coefficient stays fixed"),
    "algorithm.filter_groups.metric": ("reward", "task.resampling", "groups are compared by accuracy"),
    "algorithm.use_pf_ppo": (False, "", "there is no reweighting of samples by reward"),
    "algorithm.rollout_correction.bypass_mode": (
        False,
        "training.anchor",
        "sampler: the engine's log-probs are the old ones",
    ),
    "algorithm.kl_penalty": ("kl", "algorithm.advantage.reward_kl", "the k1 form"),
    "data.reward_fn_key": ("data_source", "reward.kind", "a reward gets every column of a problem by name"),
    "trainer.n_gpus_per_node": (8, "", _RANKS),
    "trainer.nnodes": (1, "", _RANKS),
    "trainer.critic_warmup": (0, "", "actor and critic are trained from the first step"),
    "trainer.val_before_train": (True, "", "the policy is always evaluated before the first step"),
    "trainer.resume_mode": ("auto", "", "`legato resume RUN`"),
    "reward_model.enable": (None, "reward.kind", "write a batched reward that calls the model: docs/extending.md"),
    "reward.reward_model.enable": (False, "reward.kind", "write a batched reward that calls the model: docs/extending.md"),
}

VERL: dict[str, Key] = {**_table("translated", _VERL_TRANSLATED), **_table("left out", _VERL_LEFT_OUT)}
"""The options of verl that scripts set: path -> what it is here."""

_VERL_SECTIONS = (
    "actor_rollout_ref",
    "data",
    "trainer",
    "critic",
    "reward_model",
    "custom_reward_function",
    "algorithm",
    "reward",
)


OLD_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
    "wandb_log_unique_prompts": "log_unique_prompts",
}
"""Names of options in older versions of TRL and transformers, which tutorials still have -> their names now."""


def find_key(path: tuple[str, ...]) -> tuple[str, str, Key] | None:
    """(trainer, its name of the option, the answer) for a path that may be an option of TRL or verl.

    TRL's options have one word and are also recognised below a section of ours: training.learning_rate. Of verl's, the last
    words suffice where they are unambiguous: actor.clip_ratio_low, clip_ratio_low.
    """
    words = tuple(word.lstrip("+") for word in path)
    dotted = ".".join(words)
    if dotted in VERL:
        return "verl", dotted, VERL[dotted]
    name = OLD_NAMES.get(words[-1], words[-1])
    if words[0] not in _VERL_SECTIONS[:6] and name in TRL:
        return "TRL", name, TRL[name]
    ends = [name for name in VERL if f".{name}".endswith(f".{dotted}")]
    tails = [name for name in VERL if name.rpartition(".")[2] == words[-1]]
    for names in (ends, tails if words[0] in _VERL_SECTIONS else []):
        if names and len({VERL[name].ours for name in names}) == 1:
            return "verl", names[0], VERL[names[0]]
    return None


def is_verl_section(word: str) -> bool:
    """Whether a table can only be one of verl's."""
    return word.lstrip("+") in _VERL_SECTIONS[:6]


def describe_key(trainer: str, name: str, key: Key) -> str:
    """A sentence that answers the option: ours, and how the meaning differs."""
    if key.ours and key.answer != "refused":
        difference = "" if key.says == "the same" else f" ({trainer}'s {name}: {key.says})"
        return f"did you mean {key.ours!r}?{difference}"
    return f"{trainer}'s {name} has no counterpart: {key.says}" + (f"; see {key.ours}" if key.ours else "")


def tables() -> Iterator[tuple[str, dict[str, Key]]]:
    """(trainer, its keys) for the page."""
    yield "TRL", TRL
    yield "verl", VERL
