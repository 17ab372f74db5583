"""The studies of the repository, by name."""

from __future__ import annotations

from benchmarks.studies import figures
from benchmarks.studies.study import Arm, Curve, Figure, Study

HALF = 0.5
"""A share of held-out errands done, until which steps are counted."""

LEARNING_CURVES = (
    Curve("held-out errands done", "success/mean", "eval"),
    Curve("mean reward in training", "reward/mean"),
)

LEARNING_FIGURES = (
    Figure("held-out success before", figures.first("success/mean", "eval"), ".0%"),
    Figure("after", figures.last("success/mean", "eval"), ".0%"),
    Figure("mean of all evaluations", figures.mean("success/mean", "eval"), ".0%"),
    Figure(f"steps to {HALF:.0%}", figures.steps_to("success/mean", HALF), ".0f"),
    Figure("turns at the end", figures.last("turns/mean", "eval"), ".1f"),
    Figure("minutes", figures.total("time/step_s", 60), ".1f"),
    Figure("sampled tokens, thousands", figures.total("rows/sampled_tokens", 1000), ".0f"),
    Figure("tokens in rows, thousands", figures.total("rows/tokens", 1000), ".0f"),
)

FORGETFUL = ("agent=agentfly.tasks.depot:forgetful_depot_agent", "training.strategy=step")
"""Every turn is a row of its own, prompted by the errand and the last turn alone."""

CHAIN_VS_STEP = Study(
    name="chain-vs-step",
    question="Does an agent learn more from whole conversations, or from turns that see the last turn alone?",
    config="agentfly.tasks.depot:tiny.yaml",
    words=("training.learning_rate=6e-4",),
    arms=(
        Arm("chain", "chain: one growing conversation", ("training.strategy=chain",)),
        Arm("step", "step: the errand and the last turn", FORGETFUL),
    ),
    curves=LEARNING_CURVES,
    figures=LEARNING_FIGURES,
)

GRPO_VS_GIGPO = Study(
    name="grpo-vs-gigpo",
    question="Does an advantage of each step among equal states help where only the end is rewarded?",
    config="agentfly.tasks.depot:tiny.yaml",
    words=(*FORGETFUL, "training.steps=30", "training.eval_every_steps=5"),
    arms=(
        Arm("grpo", "GRPO", ("training.algorithm=grpo",)),
        Arm("gigpo", "GiGPO", ("training.algorithm=gigpo",)),
    ),
    curves=LEARNING_CURVES,
    figures=LEARNING_FIGURES,
)

RETOKENIZATION = Study(
    name="retokenization",
    question="What becomes of mismatch and gradient where text, not ids, passes between sampling and training?",
    config="benchmarks.studies:retokenization.yaml",
    arms=(
        Arm("sampled", "sampled ids"),
        Arm("retokenized", "re-tokenized text", program="benchmarks.studies.retokenization"),
    ),
    curves=(
        Curve("KL of the sampler from the trainer, nats a token", "mismatch/k3_kl", log=True),
        Curve("gradient norm before clipping", "policy/grad_norm"),
        Curve("mean reward in training", "reward/mean"),
    ),
    figures=(
        Figure("KL, mean of steps", figures.mean("mismatch/k3_kl"), ".1e"),
        Figure("KL, largest step", figures.largest("mismatch/k3_kl"), ".1e"),
        Figure("largest log-prob difference", figures.largest("mismatch/logprob_diff_max"), ".1e"),
        Figure("gradient norm, mean", figures.mean("policy/grad_norm")),
        Figure("gradient norm, largest", figures.largest("policy/grad_norm")),
        Figure("rows changed", figures.mean("retokenization/changed_rows_fraction"), ".1%"),
        Figure("sampled tokens lost", figures.mean("retokenization/lost_tokens_fraction"), ".2%"),
        Figure("reward of the last step", figures.last("reward/mean")),
        Figure("minutes", figures.total("time/step_s", 60), ".1f"),
    ),
)

STUDIES = {study.name: study for study in (CHAIN_VS_STEP, GRPO_VS_GIGPO, RETOKENIZATION)}
