"""What ``scripts/train_drafter.py`` is made of: prompts, continuations, the network's training pass, the loop."""
