"""A reward model on a real PyTriton server, as NeMo-Aligner's reward server binds it.

``python pytriton_reward.py HTTP_PORT GRPC_PORT WORKSPACE`` runs in an environment with nvidia-pytriton and serves until standard
input ends. The score is a quarter of the number of response tokens, which are those from 20 on; token 9 is a mark, too. With a
token 8, the reward is NaN; with a token 7, the model raises.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def infer(**inputs: Any) -> dict[str, Any]:
    if "sentences" in inputs:
        words = [str(row[0], "utf-8").split() for row in inputs["sentences"]]
        rows = [[int(word[1:]) for word in row] for row in words]
    else:
        lengths = inputs["sequence_lengths"][:, 0]
        rows = [row[:length].tolist() for row, length in zip(inputs["tokens"], lengths, strict=True)]
    if any(7 in row for row in rows):
        raise RuntimeError("secret: this response cannot be scored")
    rewards = [sum(20 <= token < 30 or token == 9 for token in row) / 4 for row in rows]
    values = [float("nan") if 8 in row else reward for row, reward in zip(rows, rewards, strict=True)]
    return {"rewards": np.array(values, np.float32)[:, None]}


def main(http_port: str, grpc_port: str, workspace: str) -> None:
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=int(http_port),
        grpc_address="127.0.0.1",
        grpc_port=int(grpc_port),
        allow_metrics=False,
        exit_on_error=True,
    )
    with Triton(config=config, workspace=workspace) as triton:
        triton.bind(
            model_name="reward_model",
            infer_func=infer,
            inputs=[
                Tensor(name="sentences", shape=(1,), dtype=bytes, optional=True),
                Tensor(name="tokens", shape=(-1,), dtype=np.int64, optional=True),
                Tensor(name="sequence_lengths", shape=(1,), dtype=np.int64, optional=True),
            ],
            outputs=[Tensor(name="rewards", shape=(1,), dtype=np.float32)],
            config=ModelConfig(
                batching=True, max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=2000)
            ),
        )
        triton.run()
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
