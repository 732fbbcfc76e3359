"""Input, exact reference and checker of the contest's problem nvfp4_gemm.

C[m, n, l] (fp16) = A[m, k, l] * B[n, k, l]^T, where A and B hold e2m1 numbers and every 16 consecutive k share one e4m3
scale. Formats: OCP Microscaling Formats (MX) 1.0, 5.3.3 (e2m1), and OCP 8-bit Floating Point 1.0 (e4m3).

Scales and their sign: a scale is decoded here as the ``e4m3fn`` that torch stores, so 0x80 is -0, 0x7f and 0xff are NaN
and 0x81...0xfe are negative. The tensor core reads the same byte as *unsigned* e4m3 (PTX ISA 9.7.16, ``.ue4m3``) and
ignores the sign. Both agree on every byte that the contest's input holds (0, 1, 2, 3), on 0x80 (zero) and on NaN; they
differ for negative scales, which no generator here produces. A NaN scale makes exactly its row (SFA) or its column
(SFB) of C NaN.
"""

import torch

from task import input_t, output_t

SCALE_VECTOR = 16  # consecutive k elements that share one scale
ATOM_ROWS, ATOM_SCALES = 128, 4  # rows and scales of one 512-byte scale-factor atom
RTOL, ATOL = 1e-3, 1e-3
SCALE_KINDS = ("contest", "distinct", "bits")

_CONTEST_SCALES = (0x00, 0x38, 0x40, 0x44)  # e4m3 of 0, 1, 2, 3
_DISTINCT_BASE, _DISTINCT_COUNT = 0x20, 43  # e4m3 codes 0x20...0x4a are 0.125...5; 43 is prime
_MAX_MISMATCHES_SHOWN = 5
_CHUNK_ELEMENTS = 1 << 24  # decoded at a time, so that the decoded operand stays small


def generate_input(
    m: int,
    n: int,
    k: int,
    l: int,  # noqa: E741
    seed: int,
    device: torch.device | str | None = None,
    scales: str = "contest",
) -> input_t:
    """The contest's seven tensors ``(a, b, sfa_ref, sfb_ref, sfa_permuted, sfb_permuted, c)`` with its layouts.

    ======================  =====================================  ==========================================
    tensor                  shape, dtype                           strides in elements
    ======================  =====================================  ==========================================
    a                       [m, k/2, l] float4_e2m1fn_x2           (k/2, 1, m*k/2); the low nibble is even k
    b                       [n, k/2, l] float4_e2m1fn_x2           (k/2, 1, n*k/2)
    sfa_ref, sfb_ref        [mn, k/16, l] float8_e4m3fn            (k/16, 1, mn*k/16)
    sfa_permuted, sfb_...   [32, 4, ceil(mn/128), 4, ceil(k/64),   (16, 4, 512*ceil(k/64), 1, 512, batch)
                            l] float8_e4m3fn
    c                       [m, n, l] float16                      (n, 1, m*n); filled with randn
    ======================  =====================================  ==========================================

    The permuted scales are a view of memory [l, ceil(mn/128), ceil(k/64), 32, 4, 4]: row r, scale s of an atom lies at
    byte ``(r % 32) * 16 + (r / 32 % 4) * 4 + s % 4``. Places outside mn x k/16 hold random bytes, NaN among them.

    Args:
        m, n, l: at least 1.
        k: a positive multiple of 16.
        seed: not negative; taken modulo 2^63. The same seed gives other numbers on another kind of device.
        device: where the tensors lie; None is the current CUDA device, or the CPU where there is none.
        scales: ``"contest"``: random integers 0...3; ``"distinct"``: 0.125...5, where any two along a row, a column or
            the batches differ unless a multiple of 43 apart; ``"bits"``: the bytes 0x00, 0x01 and 0x80 in even rows,
            0x00, 0x7e and 0x80 in odd rows, and NaN (0x7f, 0xff) in row m // 2 of A and row n // 2 of B.

    Raises:
        TypeError: a size or the seed is not an int.
        ValueError: a size, the seed or ``scales`` is out of range.
    """
    _validate(m, n, k, l, seed, scales)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(seed % 2**63)
    a = _random_bytes((l, m, k // 2), generator).permute(1, 2, 0).view(torch.float4_e2m1fn_x2)
    b = _random_bytes((l, n, k // 2), generator).permute(1, 2, 0).view(torch.float4_e2m1fn_x2)
    make_scales = {"contest": _contest_scales, "distinct": _distinct_scales, "bits": _bit_pattern_scales}[scales]
    sfa = make_scales((l, m, k // SCALE_VECTOR), generator)
    sfb = make_scales((l, n, k // SCALE_VECTOR), generator)
    sfa_permuted = _permute_scales(sfa, generator)
    sfb_permuted = _permute_scales(sfb, generator)
    sfa_ref, sfb_ref = (scale.permute(1, 2, 0).view(torch.float8_e4m3fn) for scale in (sfa, sfb))
    c = torch.randn((l, m, n), dtype=torch.float16, device=generator.device, generator=generator).permute(1, 2, 0)
    return a, b, sfa_ref, sfb_ref, sfa_permuted, sfb_permuted, c


def ref_kernel(data: input_t, dtype: torch.dtype = torch.float32) -> output_t:
    """C[m, n, l] fp16 in new memory with strides (n, 1, m*n), from exactly decoded operands; ``data`` is not changed.

    Each decoded number has at most six significant bits, so ``dtype`` (float32, or float64 for small problems) rounds
    in the sum over k only. The sum is rounded to the nearest fp16; what is beyond its range becomes infinite.
    Only ``a, b, sfa_ref, sfb_ref`` are read.
    """
    a, b, sfa, sfb = data[:4]
    m, packed_k, batches = a.shape
    n = b.shape[0]
    step = max(1, _CHUNK_ELEMENTS // (2 * packed_k))
    c = torch.empty((batches, m, n), dtype=torch.float16, device=a.device)
    for batch in range(batches):
        left = dequantize(a[:, :, batch], sfa[:, :, batch], dtype)
        for start in range(0, n, step):
            columns = slice(start, start + step)
            right = dequantize(b[columns, :, batch], sfb[columns, :, batch], dtype)
            c[batch, :, columns] = (left @ right.T).to(torch.float16)
    return c.permute(1, 2, 0)


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, k] numbers of ``dtype`` from [rows, k/2] float4_e2m1fn_x2 and [rows, k/16] float8_e4m3fn; exact."""
    rows, packed_k = packed.shape
    # Four numbers at a time: two packed bytes, low byte and low nibble first, are one index into a table of quadruples.
    indices = packed.view(torch.uint8).contiguous().view(torch.uint16).flatten().int()
    numbers = _quadruples(dtype, packed.device).index_select(0, indices).view(rows, -1, SCALE_VECTOR)
    return numbers.mul_(scale.to(dtype).unsqueeze(-1)).view(rows, 2 * packed_k)


def check_implementation(data: input_t, output: object) -> tuple[bool, str]:
    """Whether ``output`` is C of ``data``, and a message: what is wrong with it, or the largest error.

    Checked in this order: type (torch.Tensor itself), shape, dtype, device, layout, then every element as in
    :func:`compare`. The inputs in ``data`` must be as they were before the call that made ``output``.
    """
    return compare(output, ref_kernel(data))


def compare(output: object, expected: torch.Tensor) -> tuple[bool, str]:
    """Compares with |output - expected| <= 1e-3 + 1e-3 * |expected|; infinities and NaN match only their like.

    Returns (True, "largest error E") or (False, reason). The reason names the first mismatches in the order of
    (m, n, l) with index, value found and value expected, and says how many elements mismatch.
    """
    if type(output) is not torch.Tensor:
        return False, f"the output is a {type(output).__name__}, expected a torch.Tensor"
    for what in ("shape", "dtype", "device", "layout"):
        got, wanted = getattr(output, what), getattr(expected, what)
        if got != wanted:
            return False, f"the output's {what} is {_plain(got)}, expected {_plain(wanted)}"
    got, wanted = output.float(), expected.float()
    error = (got - wanted).abs()
    close = (error <= ATOL + RTOL * wanted.abs()) & wanted.isfinite()
    right = close | (got == wanted) | (got.isnan() & wanted.isnan())
    if bool(right.all()):
        largest = error.nan_to_num(nan=0.0, posinf=0.0).max().item()
        return True, f"largest error {largest:g}"
    return False, _describe_mismatches(output, expected, ~right)


def _describe_mismatches(output: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> str:
    indices = wrong.nonzero()
    shown = [
        f"C{index} is {output[tuple(index)].item():g}, expected {expected[tuple(index)].item():g}"
        for index in indices[:_MAX_MISMATCHES_SHOWN].tolist()
    ]
    if len(indices) > len(shown):
        shown.append("...")
    return f"{len(indices)} of {wrong.numel()} elements mismatch: " + "; ".join(shown)


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def _validate(m: int, n: int, k: int, l: int, seed: int, scales: str) -> None:  # noqa: E741
    for name, value in {"m": m, "n": n, "k": k, "l": l, "seed": seed}.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        least = 0 if name == "seed" else 1
        if value < least:
            raise ValueError(f"{name} is {value}; at least {least} is needed")
    if k % SCALE_VECTOR:
        raise ValueError(f"k is {k}; a multiple of {SCALE_VECTOR} is needed, which is how many elements share a scale")
    if scales not in SCALE_KINDS:
        raise ValueError(f"scales is {scales!r}; one of {', '.join(SCALE_KINDS)} is needed")


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform uint8 of ``shape``, drawn eight at a time, which is five times as fast on a CPU as one by one."""
    count = torch.Size(shape).numel()
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(shape)


def _pick(codes: tuple[int, ...], shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniformly random bytes out of ``codes``, whose count divides 256."""
    table = torch.tensor(codes * (256 // len(codes)), dtype=torch.uint8, device=generator.device)
    return table.index_select(0, _random_bytes(shape, generator).flatten().int()).view(shape)


def _contest_scales(shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    return _pick(_CONTEST_SCALES, shape, generator)


def _distinct_scales(shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Codes that step along each axis by a random amount modulo a prime: a shift along one axis changes every scale."""
    start, *steps = _random_bytes((4,), generator).tolist()
    axes = torch.meshgrid(*(torch.arange(size, device=generator.device) for size in shape), indexing="ij")
    code = start + sum(axis * (1 + step % (_DISTINCT_COUNT - 1)) for axis, step in zip(axes, steps, strict=True))
    code = code % _DISTINCT_COUNT + _DISTINCT_BASE
    return code.to(torch.uint8)


def _bit_pattern_scales(shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Even rows small (zeros and the least subnormal), odd rows large (zeros and 448), and NaN in the middle row.

    Small and large rows are kept apart so that C has zeros, ordinary numbers and infinities, and no sum that rounding
    decides.
    """
    codes = _pick((0x00, 0x01, 0x80, 0x01), shape, generator)
    codes[:, 1::2] = _pick((0x00, 0x7E, 0x80, 0x7E), shape, generator)[:, 1::2]
    row = shape[1] // 2
    codes[:, row, 0] = 0x7F
    codes[:, row, shape[2] - 1] = 0xFF
    return codes


def _permute_scales(scale: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The contest's [32, 4, ceil(mn/128), 4, ceil(k/64), l] view from uint8 scales [l, mn, k/16]."""
    batches, rows, blocks = scale.shape
    row_atoms, block_atoms = -(-rows // ATOM_ROWS), -(-blocks // ATOM_SCALES)
    padded = _random_bytes((batches, row_atoms * ATOM_ROWS, block_atoms * ATOM_SCALES), generator)
    padded[:, :rows, :blocks] = scale
    # The four scales of an atom row stay together: move them as one 32-bit word.
    words = padded.view(torch.int32).view(batches, row_atoms, 4, 32, block_atoms)
    memory = words.permute(0, 1, 4, 3, 2).contiguous().view(torch.uint8)
    memory = memory.view(batches, row_atoms, block_atoms, 32, 4, ATOM_SCALES)
    return memory.permute(3, 4, 1, 5, 2, 0).view(torch.float8_e4m3fn)


def _quadruples(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[65536, 4] numbers: the four e2m1 numbers of every 16-bit pattern, least significant nibble first."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=dtype, device=device)
    numbers = torch.cat([magnitudes, -magnitudes])
    patterns = torch.arange(1 << 16, device=device)
    return torch.stack([numbers[(patterns >> shift) & 0xF] for shift in (0, 4, 8, 12)], dim=1)
