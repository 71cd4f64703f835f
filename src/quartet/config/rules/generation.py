"""Conditions on the generation engine, the generators and what they do beside an update."""

from __future__ import annotations

from quartet.config.rollout import ENGINES, EngineServerConfig
from quartet.config.section import is_loopback
from quartet.config.tree import ConfigTree


def check_engine(config: ConfigTree) -> None:
    """Raise ValueError if the engine of the run lacks a section, or has settings of another one."""
    if config.actor.lora is not None and config.actor.lora.dora and config.rollout.engine != "torch":
        raise ValueError(
            f"actor.lora.dora: engine {config.rollout.engine} takes adapters without magnitudes only; set rollout.engine "
            "torch, or actor.lora.dora false"
        )
    if config.rollout.merge_adapter and (config.actor.lora is None or config.rollout.engine != "torch"):
        raise ValueError(
            "rollout.merge_adapter: only for engine torch with actor.lora; expected both; set it to false, or actor.lora"
        )
    engine, triton = config.rollout.engine, config.rollout.triton
    servers = {"vllm-server": config.rollout.vllm_server, "sglang-server": config.rollout.sglang_server}
    for name, given in (
        ("triton", triton),
        ("tensorrt-llm", config.rollout.tensorrt_llm),
        ("vllm", config.rollout.vllm),
        *servers.items(),
    ):
        if given is not None and engine != name:
            key = name.replace("-", "_")
            raise ValueError(f"rollout.{key}: not used with engine {engine}; set engine {name}, or remove it")
    if engine in servers:
        _check_engine_server(config, engine, servers[engine])
    if engine != "triton":
        return
    if triton is None:
        raise ValueError("rollout.triton: missing; engine triton needs it, set rollout.triton.url")
    if triton.weights == "lora" and config.actor.lora is None:
        raise ValueError(
            "rollout.triton.weights lora: the server needs an adapter for each policy version, and actor.lora is null; set "
            "actor.lora, or weights static for a server whose weights never change"
        )
    if triton.weights == "static" and (config.rollout.top_k or config.rollout.top_p < 1):
        raise ValueError(
            "rollout.triton.weights static: importance sampling needs log-probs of the sampled distribution, and servers "
            "report none if it is truncated; set rollout.top_k 0 and rollout.top_p 1, or weights lora"
        )
    if (
        not triton.encrypted
        and not is_loopback(triton.address.rpartition(":")[0])
        and not config.security.allow_plaintext
    ):
        raise ValueError(
            f"rollout.triton.url {triton.url}: not a loopback address, and calls are not encrypted; use grpcs://, or "
            "set security.allow_plaintext"
        )


def check_turns(config: ConfigTree) -> None:
    """Raise ValueError if the limits of turns contradict each other or the engine."""
    rollout = config.rollout
    if rollout.max_turn_tokens is not None and not rollout.max_turns:
        raise ValueError("rollout.max_turn_tokens: not used without rollout.max_turns; set both, or remove it")
    if rollout.extra_samples and not rollout.max_turns:
        raise ValueError("rollout.extra_samples: chooses among episodes; set rollout.max_turns, or extra_samples 0")
    if (rollout.max_turn_tokens or 0) > rollout.max_response_tokens:
        raise ValueError(
            f"rollout.max_turn_tokens {rollout.max_turn_tokens}: expected at most rollout.max_response_tokens "
            f"{rollout.max_response_tokens}, the limit of all turns"
        )
    if rollout.max_turns and rollout.engine == "triton":
        raise ValueError(
            "rollout.max_turns: not with engine triton, whose server may get text, so that earlier turns would be tokenized "
            "again; set another rollout.engine, or max_turns 0"
        )


def check_generators(config: ConfigTree) -> None:
    """Raise ValueError if the generators do not fit the engine, their devices or the buffer."""
    engine, devices = config.rollout.engine, config.services.generator.devices
    if engine == "triton" and config.has_generators:
        raise ValueError(
            "rollout.engine triton: the actor calls the Triton server; remove rollout.generators and services.generators"
        )
    if devices and config.rollout.generators and len(devices) % config.rollout.generators:
        raise ValueError(
            f"services.generator.devices {list(devices)}: expected an equal number for each of the "
            f"{config.rollout.generators} generators of rollout.generators"
        )
    group = config.rollout.process_group
    if group == "nccl" and not (config.services.actor.devices and devices):
        raise ValueError(
            "rollout.process_group nccl: needs GPUs on both sides; set services.actor.devices and services.generator.devices, or "
            "process_group gloo"
        )
    if group != "none" and config.security.certificates is not None and not config.security.allow_plaintext:
        raise ValueError(
            f"rollout.process_group {group}: sends weights without TLS, which security.certificates asks for; set process_group "
            "none, or security.allow_plaintext true inside a network that you trust"
        )
    if config.services.generators and config.buffer.url is None:
        raise ValueError(
            "buffer.url: the generators of services.generators need a Redis server that they share with this run; set "
            "buffer.url"
        )


def _check_engine_server(config: ConfigTree, engine: str, server: EngineServerConfig | None) -> None:
    section = f"rollout.{engine.replace('-', '_')}"
    if server is None:
        raise ValueError(f"{section}: missing; engine {engine} needs it, set {section}.url")
    if server.weights == "lora" and config.actor.lora is None:
        raise ValueError(
            f"{section}.weights lora: the server loads an adapter for each policy version, and actor.lora is null; set "
            "actor.lora, or weights folder"
        )
    if server.weights == "folder" and config.actor.lora is not None:
        raise ValueError(
            f"{section}.weights folder: the server loads a whole checkpoint, and actor.lora trains an adapter; set weights "
            "lora, or actor.lora null"
        )
    if config.rollout.generators > 1:
        raise ValueError(
            f"rollout.generators {config.rollout.generators}: a server holds the weights of one generator; set 1, or name the "
            "generators of further servers in services.generators"
        )
    if not server.encrypted and not is_loopback(server.host) and not config.security.allow_plaintext:
        raise ValueError(
            f"{section}.url {server.url}: not a loopback address, and calls are not encrypted; use https://, or set "
            "security.allow_plaintext"
        )


def check_dynamic_sampling(config: ConfigTree) -> None:
    """Raise ValueError if rollout.dynamic_sampling does not fit the scores."""
    if not config.rollout.dynamic_sampling:
        return
    setting, samples = "rollout.dynamic_sampling", config.rollout.samples_per_prompt
    if samples < 2:
        raise ValueError(
            f"{setting}: compares the scores of a prompt's responses; set rollout.samples_per_prompt to 2 or more, not "
            f"{samples}"
        )
    if not config.has_scores:
        raise ValueError(
            f"{setting}: compares scores, and with reward.source none there are none; set another source, or "
            "dynamic_sampling false"
        )


def check_off_policy(config: ConfigTree) -> None:
    """Raise ValueError if rollout.max_off_policy_steps does not fit the engine."""
    if not config.rollout.max_off_policy_steps:
        return
    setting = f"rollout.max_off_policy_steps {config.rollout.max_off_policy_steps}"
    if config.rollout.engine == "triton":
        raise ValueError(
            f"{setting}: engine triton cannot generate during an update; set another engine, or max_off_policy_steps 0"
        )


def check_in_flight_updates(config: ConfigTree) -> None:
    """Raise ValueError if rollout.in_flight_updates does not fit the generators."""
    if not config.rollout.in_flight_updates:
        return
    setting, vllm = "rollout.in_flight_updates", config.rollout.vllm
    if config.rollout.engine not in ("torch", "vllm", "sglang-server"):
        raise ValueError(
            f"{setting}: engine {config.rollout.engine} takes new weights between generations only; set engine torch, vllm or "
            "sglang-server, or in_flight_updates false"
        )
    if not config.has_generators:
        raise ValueError(
            f"{setting}: the actor's own engine takes new weights between generations only; set rollout.generators, or "
            "in_flight_updates false"
        )
    if not config.rollout.max_off_policy_steps:
        raise ValueError(
            f"{setting}: with max_off_policy_steps 0 nothing is generated during an update; set max_off_policy_steps to 1 or "
            "more, or in_flight_updates false"
        )
    if config.rollout.engine == "sglang-server" and config.actor.lora is not None:
        raise ValueError(
            f"{setting}: SGLang keeps the adapter of a response until its end, and actor.lora trains an adapter; set "
            "in_flight_updates false, or actor.lora null"
        )
    if vllm is not None and vllm.release_memory:
        raise ValueError(
            f"{setting}: generation and training overlap, so rollout.vllm.release_memory cannot free the GPU in between; set "
            "one of the two to false"
        )


def check_router_replay(config: ConfigTree) -> None:
    """Raise ValueError if rollout.router_replay does not fit the engine, the episodes or the training of the actor."""
    rollout, vllm, engine = config.rollout, config.rollout.vllm, config.rollout.engine
    if not rollout.router_replay:
        return
    tensor = config.services.actor.parallel.tensor
    for contradicts, reason, remedy in (
        (
            engine in ENGINES and engine not in ("torch", "vllm"),
            f"engine {engine} does not report the experts of its tokens",
            "set engine torch or vllm",
        ),
        (
            rollout.max_turns > 0,
            f"rollout.max_turns {rollout.max_turns}: the experts of episodes are not recorded",
            "set max_turns 0",
        ),
        (
            rollout.in_flight_updates,
            "rollout.in_flight_updates: vLLM and Quartet have not recorded experts across an update",
            "set in_flight_updates false",
        ),
        (
            vllm is not None and not vllm.prefix_caching,
            "rollout.vllm.prefix_caching false: vLLM records experts by the blocks of its prefix cache",
            "set prefix_caching true",
        ),
        (
            vllm is not None and vllm.speculative is not None,
            "rollout.vllm.speculative: experts of proposed tokens are not tested",
            "remove it",
        ),
        (config.actor.compile, "actor.compile: compiled layers choose their own experts", "set compile false"),
        (
            tensor > 1,
            f"services.actor.parallel.tensor {tensor}: the routers of a slice of the model are not replayed",
            "set tensor 1",
        ),
    ):
        if contradicts:
            raise ValueError(f"rollout.router_replay: {reason}; {remedy}, or router_replay false")
