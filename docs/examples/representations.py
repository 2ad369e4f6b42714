"""# Do people see the same things alike?

Twenty-four people judge sixteen items of four categories. Their distances are averaged over groups,
and the items are found from these alone: the larger the groups, the more of them.
"""

import numpy as np
from matplotlib import pyplot as plt

import torchgw

rng = np.random.default_rng(0)
categories = np.repeat(["animal", "tool", "food", "plant"], 4)
items = 2 * rng.normal(size=(4, 6))[np.arange(16) // 4] + rng.normal(size=(16, 6))
people = [items + 1.2 * rng.normal(size=items.shape) for _ in range(24)]
subjects = torchgw.Representations(people, metric="euclidean", categories=categories)

scores = {}
for groups in (8, 4, 2):
    means = subjects.grouped(groups, random_state=0)
    match = means.align(kind="star", random_state=0)
    off = ~np.eye(groups, dtype=bool)
    scores[24 // groups] = (
        means.rsa()[off].mean(), match.top_k(1)[off].mean(), match.category_accuracy()[off].mean()
    )  # fmt: skip
    print(f"{24 // groups} people a group: {match}")

for name, line in zip(
    ("RSA, items known", "top 1", "category"), np.array([*scores.values()]).T, strict=True
):
    plt.plot([*scores], line, "o-", label=name)
plt.axhline(1 / 16, color="0.7", linestyle=":", label="chance of top 1")
plt.gca().set(xlabel="people in a group", ylabel="correlation, or share", ylim=(0, 1.02))
plt.legend()
