"""A CuTeDSL kernel of a few lines."""

import cutlass.cute as cute


@cute.kernel
def double_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = 32 * block + thread
    y[i] = x[i] + x[i]


@cute.jit
def double(x: cute.Tensor, y: cute.Tensor):
    """y[i] = 2 x[i] for every i of x, 32 threads a CTA."""
    double_kernel(x, y).launch(grid=(cute.size(x) // 32, 1, 1), block=(32, 1, 1))
