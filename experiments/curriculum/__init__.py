"""Which prompts are drawn, how often, and with how much help."""

# what ``python -m jaxrl_llm.experiment compare`` sets for this family
COMPARE = {"baseline": "balanced_filtering:grpo", "bed": "sparse_search"}
