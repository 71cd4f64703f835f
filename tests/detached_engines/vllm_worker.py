"""Methods of vLLM's workers that change its memory as no update does."""

from __future__ import annotations

from typing import Any

from quartet.engines.vllm_transfer import packed_layout
from quartet.engines.vllm_worker import WeightsExtension, _read_back


class ChangingWorker(WeightsExtension):
    """The product's part of the worker, and faults."""

    def quartet_flip(self, module_name: str, name: str) -> str:
        """Flip the lowest bit of one element of a parameter, in the memory that vLLM computes with."""
        import torch
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        module: Any = dict(self.model_runner.get_model().named_modules())[module_name]
        if packed_layout(module):
            # Whatever its place is, it is one weight of one expert.
            getattr(module, name).data.view(-1)[3:4].view(torch.uint8)[0] ^= 1
            return ""
        value = _read_back(module, name)
        changed = value.clone()
        changed.view(-1)[3:4].view(torch.uint8)[0] ^= 1
        looks_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        if hasattr(module, "cpu_linear") and not looks_up:
            previous = module.weight
            module.weight = torch.nn.Parameter(changed, requires_grad=False)
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            module.weight = previous
        else:
            getattr(module, name).data.copy_(changed)
        return ""

    def quartet_flip_adapter(self, module_name: str) -> str:
        """Change one element of the active adapter."""
        wrapper = self.model_runner.lora_manager._adapter_manager.modules[module_name]
        wrapper.lora_b_stacked[0][0, 0, 1, 1] += 1e-3
        return ""
