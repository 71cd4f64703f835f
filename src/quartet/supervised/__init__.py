"""The stages before RLHF, on the trainers of TRL: supervised fine-tuning, and the training of a reward model."""
