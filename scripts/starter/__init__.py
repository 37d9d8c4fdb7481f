"""Parts of `scripts/make_starter.py`: the supervised model (`sft`) and the reward model (`reward`)."""
