"""Conditions on sampling, the correction for the engine's log-probs, and penalties."""

from __future__ import annotations

from quartet.config.rollout import MAX_RESPONSES, RolloutConfig, TensorRTLLMConfig
from quartet.config.tree import ConfigTree


def check_sampling(config: ConfigTree) -> None:
    """Raise ValueError for a setting of the sampling that the engine of the run does not support."""
    rollout = config.rollout
    if config.num_greedy_baselines:
        _check_greedy_baselines(config)
    if rollout.stop_strings and rollout.engine == "triton":
        raise ValueError(
            "rollout.stop_strings: not with engine triton, whose models cannot keep the tokens of a stop string in the response; "
            "set another rollout.engine, or remove them"
        )
    if rollout.min_p:
        if rollout.engine == "triton":
            raise ValueError(
                f"rollout.min_p {rollout.min_p:g}: models on Triton have no input for it; set min_p 0, or another rollout.engine"
            )
        sampler = (rollout.tensorrt_llm or TensorRTLLMConfig()).sampler
        if rollout.engine == "tensorrt-llm" and sampler != "TRTLLMSampler":
            raise ValueError(
                f"rollout.min_p {rollout.min_p:g}: the {sampler} of TensorRT-LLM ignores it; set min_p 0, or "
                "rollout.tensorrt_llm.sampler TRTLLMSampler"
            )
        if rollout.vllm is not None and rollout.vllm.speculative is not None:
            raise ValueError(
                f"rollout.min_p {rollout.min_p:g}: vLLM has no min_p with speculative decoding; set min_p 0, or remove "
                "rollout.vllm.speculative"
            )
    _check_sampling_penalties(rollout)
    if rollout.structured_output is not None and rollout.engine not in ("vllm-server", "sglang-server"):
        reason = "runs without a tokenizer" if rollout.engine == "vllm" else "cannot keep a form"
        raise ValueError(
            f"rollout.structured_output: engine {rollout.engine} {reason}; set rollout.engine vllm-server or sglang-server, or "
            "remove it"
        )
    if rollout.max_off_policy_steps:
        _check_off_policy_log_probs(rollout)


def _sampling_penalties(rollout: RolloutConfig) -> dict[str, str]:
    """Return the penalties that change logits, each with the value that disables it."""
    values = {
        "repetition_penalty": (rollout.repetition_penalty, 1),
        "presence_penalty": (rollout.presence_penalty, 0),
        "frequency_penalty": (rollout.frequency_penalty, 0),
    }
    return {f"rollout.{key} {value:g}": f"{key} {off}" for key, (value, off) in values.items() if value != off}


def _check_sampling_penalties(rollout: RolloutConfig) -> None:
    """Raise ValueError for a penalty that the engine does not have, or has with another meaning."""
    for setting, remedy in _sampling_penalties(rollout).items():
        if rollout.engine == "sglang-server" and "repetition" in setting:
            raise ValueError(
                f"{setting}: SGLang applies it to tokens of the response only, and not to those of the prompt; set {remedy}, or "
                "rollout.engine torch, vllm or vllm-server"
            )
        if rollout.engine not in ("torch", "vllm", "vllm-server", "sglang-server"):
            raise ValueError(
                f"{setting}: not with engine {rollout.engine}; set {remedy}, or rollout.engine torch, vllm, vllm-server or "
                "sglang-server"
            )


def _check_off_policy_log_probs(rollout: RolloutConfig) -> None:
    """Raise ValueError if the engine reports no log-probs, which the trainer cannot compute with an older policy."""
    settings = settings_without_log_probs(rollout)
    if settings:
        reshapes = _sampling_penalties(rollout) or rollout.structured_output is not None
        others = "torch" if reshapes else "torch or sglang-server"
        raise ValueError(
            f"rollout.max_off_policy_steps {rollout.max_off_policy_steps}: the correction needs log-probs of the older policy "
            f"that sampled, and engine {rollout.engine} reports none with {', '.join(settings)}; set "
            f"{', '.join(settings.values())}, or engine {others}, or max_off_policy_steps 0"
        )


def settings_without_log_probs(rollout: RolloutConfig) -> dict[str, str]:
    """Return the settings with which the engine reports no log-probs, each with the value that changes this.

    A version of TensorRT-LLM may report none at other temperatures than 1, too, which only a run shows.
    """
    settings = {} if rollout.engine == "torch" else _sampling_penalties(rollout)
    if rollout.structured_output is not None:
        settings["rollout.structured_output"] = "structured_output null"
    if rollout.engine not in ("vllm", "vllm-server", "tensorrt-llm"):
        return settings
    if rollout.top_p < 1:
        settings[f"rollout.top_p {rollout.top_p:g}"] = "top_p 1"
    if rollout.top_k:
        settings[f"rollout.top_k {rollout.top_k}"] = "top_k 0"
    if rollout.min_p:
        settings[f"rollout.min_p {rollout.min_p:g}"] = "min_p 0"
    if rollout.engine == "tensorrt-llm" and rollout.temperature != 1:
        sampler = (rollout.tensorrt_llm or TensorRTLLMConfig()).sampler
        if sampler == "TRTLLMSampler":
            settings[f"{sampler} and rollout.temperature {rollout.temperature:g}"] = "temperature 1"
    return settings


def _check_greedy_baselines(config: ConfigTree) -> None:
    algorithm, rollout = config.algorithm, config.rollout
    setting = f"algorithm.estimator {algorithm.estimator}"
    if algorithm.gamma != 1:
        raise ValueError(
            f"algorithm.gamma {algorithm.gamma}: discounts the returns of sampled responses, and not the greedy baseline that "
            f"{setting} subtracts from them; leave gamma at 1"
        )
    if algorithm.whiten_rewards:
        raise ValueError(
            "algorithm.whiten_rewards: scales the rewards of sampled responses, and not the greedy baseline that "
            f"{setting} subtracts from them; leave it false"
        )
    if not config.has_scores:
        raise ValueError(
            f"{setting}: compares the scores of sampled and greedy responses, and with reward.source none there are none; use "
            "another estimator"
        )
    if rollout.dynamic_sampling:
        raise ValueError(
            f"rollout.dynamic_sampling: compares sampled responses with each other, and {setting} compares them with a greedy "
            "one; set it to false, or use another estimator"
        )
    responses = rollout.prompts_per_step * (rollout.samples_per_prompt + 1)
    if responses > MAX_RESPONSES:
        raise ValueError(
            f"{setting}: with its greedy responses a step has {responses} responses; expected at most {MAX_RESPONSES}; lower "
            "rollout.prompts_per_step or rollout.samples_per_prompt"
        )


def check_penalties(config: ConfigTree) -> None:
    """Raise ValueError if the settings of the KL penalty or of the entropy contradict each other or the rest of the config."""
    algorithm = config.algorithm
    if algorithm.kl_estimator == "absolute" and not algorithm.has_kl_loss:
        _check_rounding(config)
    _check_kl_controller(config)
    _check_entropy_controller(config)


def _check_rounding(config: ConfigTree) -> None:
    """Refuse log-probs whose rounding errors differ between policy and reference: each error would count as KL."""
    setting, remedy = "algorithm.kl_estimator absolute", "set kl_estimator k1"
    rollout = config.rollout
    for key, dtype in (("actor.dtype", config.actor.dtype), ("reference.dtype", config.reference.dtype)):
        if dtype not in (None, "float32"):
            raise ValueError(
                f"{setting}: with {key} {dtype} the log-probs of policy and reference round differently once their weights "
                f"differ, and each rounding error counts as KL; {remedy}, or {key} float32"
            )
    if config.algorithm.kl_log_probs == "trainer":
        return
    for cause, differs in (
        (f"rollout.engine {rollout.engine}", rollout.engine != "torch"),
        ("rollout.merge_adapter", rollout.merge_adapter),
    ):
        if differs:
            raise ValueError(
                f"{setting}: with {cause} the log-probs of the engine round differently from those of the reference, and "
                f"each rounding error counts as KL; {remedy}, or kl_log_probs trainer"
            )


def _check_kl_controller(config: ConfigTree) -> None:
    controller, coefficient = config.algorithm.kl_controller, config.algorithm.kl_coefficient
    if controller.kind == "fixed":
        return
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    setting = f"algorithm.kl_controller.kind {controller.kind}"
    if coefficient == 0:
        raise ValueError(f"{setting}: it scales kl_coefficient, which is 0; set kl_coefficient above 0, or kind fixed")
    if controller.kind == "adaptive" and controller.horizon <= 0.2 * samples:
        raise ValueError(
            f"{setting}: horizon {controller.horizon:g}: expected more than {0.2 * samples:g}, a fifth of the responses "
            "of a step"
        )
    if controller.kind == "simple" and controller.horizon <= 1:
        raise ValueError(f"{setting}: horizon {controller.horizon:g}: expected more than 1 step")


def _check_entropy_controller(config: ConfigTree) -> None:
    controller, coefficient = config.algorithm.entropy_controller, config.algorithm.entropy_coefficient
    low, high = controller.min_coefficient, controller.max_coefficient
    if low > high:
        raise ValueError(
            f"algorithm.entropy_controller.min_coefficient {low:g}: expected at most max_coefficient {high:g}"
        )
    if controller.kind == "adaptive" and not low <= coefficient <= high:
        raise ValueError(
            f"algorithm.entropy_coefficient {coefficient:g}: expected {low:g} to {high:g}, the bounds of "
            "algorithm.entropy_controller"
        )


def check_rollout_correction(config: ConfigTree) -> None:
    """Raise ValueError if algorithm.rollout_correction, algorithm.old_log_probs and the rollout do not fit each other."""
    algorithm, rollout = config.algorithm, config.rollout
    correction = algorithm.rollout_correction
    uses_engine = algorithm.old_log_probs == "rollout"
    if uses_engine and correction.level != "none":
        raise ValueError(
            "algorithm.old_log_probs rollout: the ratio of the policy loss then compares with the engine, and importance weights "
            "would count the difference twice; set algorithm.rollout_correction.level none"
        )
    if uses_engine or correction.level != "none":
        return
    remedy = "set algorithm.rollout_correction.level, such as token, or algorithm.old_log_probs rollout with level none"
    if rollout.triton is not None and rollout.triton.weights == "static":
        raise ValueError(
            "rollout.triton.weights static: the server samples from another policy than the trained one, which needs "
            f"a correction; {remedy}"
        )
    if rollout.max_off_policy_steps and not correction.rejection:
        raise ValueError(
            f"rollout.max_off_policy_steps {rollout.max_off_policy_steps}: responses come from an older policy than the trained "
            f"one, which needs a correction; {remedy}"
        )
