"""On-policy distillation: advantages of each token from the log-probs of a teacher."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.ppo.ragged import check_flat, discounted_sum


@torch.no_grad()
def distillation_advantages(
    log_probs: Tensor, teacher_log_probs: Tensor, lengths: Tensor, coefficient: float, discount: float
) -> Tensor:
    """Return coefficient times the discounted sum of log pi_teacher - log pi from each token on: [tokens].

    ``log_probs`` and ``teacher_log_probs`` [tokens], of the tokens that the policy sampled; ``lengths`` [sequences]. With
    discount 0 a token gets its own term only. The mean of the terms is minus an estimate of KL(policy || teacher), the reverse
    KL. Sources: Agarwal et al. 2023 (on-policy distillation); Lu and Thinking Machines 2025 (the term as the advantage); numerics
    item 24. Raises InvalidRequest.
    """
    check_flat(log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    terms = teacher_log_probs.double() - log_probs.double()
    return (coefficient * discounted_sum(terms, lengths, discount)).to(log_probs.dtype)
