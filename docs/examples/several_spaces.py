"""# Several spaces that agree

Five noisy copies of one cloud, matched in pairs, contradict each other: two steps lead elsewhere
than the direct way. Through a common space all cycles close, and more points find their partner.
"""

import numpy as np
from matplotlib import pyplot as plt

import torchgw

rng = np.random.default_rng(0)
cloud = rng.normal(size=(20, 3))
copies = [cloud + 0.25 * rng.normal(size=cloud.shape) for _ in range(5)]

result = torchgw.solve_all(copies, distances="euclidean", random_state=0)
print(result)

truth = np.arange(len(cloud))
alone = [(result.pair(i, j).lazy_plan.argmax() == truth).mean() for i, j in result.pairs.tolist()]
joint = [(result.matching(i, j) == truth).mean() for i, j in result.pairs.tolist()]
print(f"right: pairs alone {np.mean(alone):.0%}, through the common space {np.mean(joint):.0%}")
print(f"cycles open: pairs alone {result.cycle_error:.0%}, through the common space none")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
result.plot(ax=left)
right.scatter(alone, joint)
right.axline((0.5, 0.5), slope=1.0, color="0.7", zorder=0)
right.set(xlabel="right alone", ylabel="right through the common space")
