"""Products of many small matrices, whose bits do not depend on how many others there are."""

import torch
from torch import Tensor

from torchgw._batch.warm import LARGEST_ROUGH, has_triton


def products(left: Tensor, right: Tensor) -> Tensor:
    """Compute left (k, n, l) times right (k, l, m), float64; one pair alone is taken twice."""
    # a library chooses its way on a GPU by the number of products
    if has_triton(left.device) and max(*left.shape[1:], right.shape[2]) <= LARGEST_ROUGH:
        from torchgw._batch.product_triton import batch_product

        return batch_product(left, right)
    if len(left) == 1:
        return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
    return torch.bmm(left, right)
