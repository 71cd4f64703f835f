"""Commands that load models in this process. They need the extra quartet-rlhf[train]."""
