"""Losses and advantages of the policy gradient."""

# what ``python -m jaxrl_llm.experiment compare`` sets for this family
COMPARE = {"baseline": "dr_grpo:grpo", "bed": "sparse_search"}
