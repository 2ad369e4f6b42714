"""# How time grows with the number of points

Landmark geodesics, from points to result, on the machine that built this page. As long as the cost
of an iteration is stored, time and memory are quadratic; beyond, time is quadratic and memory
linear.
"""

import time

import numpy as np
from matplotlib import pyplot as plt
from scipy.stats import spearmanr

import torchgw
from torchgw.datasets import spiral, swiss_roll

sizes, seconds = [300, 600, 1200, 2400], []
for n in sizes:
    X, angle_x = spiral(n, random_state=0)
    Y, angle_y = swiss_roll(n, random_state=1)
    start = time.perf_counter()
    result = torchgw.solve(X, Y, distances="landmark", n_init=1, random_state=0)
    seconds.append(time.perf_counter() - start)
    match = result.lazy_plan.argmax()
    quality = abs(spearmanr(angle_x, angle_y[match])[0])
    print(
        f"{n:5d} x {n:5d}  {seconds[-1]:6.2f} s  rank correlation {quality:.4f}  "
        f"marginal error {result.marginal_error:.1e}  {result.status.name}"
    )

slope, offset = np.polyfit(np.log(sizes), np.log(seconds), 1)
print(f"time grows as n^{slope:.2f}")
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
ax.loglog(sizes, seconds, "o", label="measured")
ax.loglog(sizes, np.exp(offset) * np.array(sizes) ** slope, label=f"n^{slope:.2f}")
ax.set_xlabel("points on each side")
ax.set_ylabel("seconds")
ax.legend(frameon=False)
