"""Types and cases of the contest's problem nvfp4_gemm: C = A * B^T with block-scaled 4-bit operands.

The names ``input_t``, ``output_t`` and ``TestSpec`` are those of the organisers' ``task.py`` (GPU MODE's
reference-kernels), so that a submission which imports them runs here unchanged.
"""

from typing import TypedDict

import torch

# (a, b, sfa_ref, sfb_ref, sfa_permuted, sfb_permuted, c); reference.generate_input states shapes, strides and dtypes.
input_t = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
output_t = torch.Tensor


class TestSpec(TypedDict):
    """One problem: C[m, n, l] from A[m, k, l] and B[n, k, l], k in elements, and the seed of its random input."""

    m: int
    n: int
    k: int
    l: int  # noqa: E741 (the contest's name for the batch)
    seed: int


CONTEST_SEED = 1111


def _cases(*sizes: tuple[int, int, int]) -> tuple[TestSpec, ...]:
    return tuple(TestSpec(m=m, n=n, k=k, l=1, seed=CONTEST_SEED) for m, n, k in sizes)


TEST_CASES = _cases(
    (128, 256, 256),
    (128, 1536, 7168),
    (128, 3072, 1536),
    (256, 7168, 256),
    (256, 7168, 2048),
    (2304, 4608, 7168),
    (384, 7168, 2304),
    (512, 512, 7168),
    (512, 4096, 512),
    (512, 1536, 7168),
)

BENCHMARK_CASES = _cases((128, 7168, 16384), (128, 4096, 7168), (128, 7168, 2048))
