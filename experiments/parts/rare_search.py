"""The certified search of short Countdown as a preset, for every paper whose claim can show there.

A base that solves one problem in six with one response and two of three with eight, 120 updates that take it to one in
four, no more than half of it before the first of ten evaluations (`results/beds/sparse_search.certificate.json`).
"""

EMBEDDED = {
    "data": "countdown", "levels": (3,), "train_problems": 2048, "steps": 120, "eval_every": 12, "prompts_per_step": 6,
    "group_size": 8, "max_new_tokens": 18, "learning_rate": 2e-4, "eval_problems": 192,
}  # fmt: skip
