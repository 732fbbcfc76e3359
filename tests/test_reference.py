"""reference.py against decoding in plain Python arithmetic, and its checker against each kind of wrong output."""

import math
import re
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from reference import SCALE_KINDS, check_implementation, compare, dequantize, generate_input, ref_kernel

SHAPES = [(1, 8, 16, 1), (3, 5, 32, 3), (127, 8, 64, 1), (129, 136, 80, 1), (128, 24, 256, 2)]


def e2m1(nibble: int) -> Fraction:
    """OCP MX 1.0, 5.3.3: sign, two exponent bits of bias 1, one mantissa bit."""
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    magnitude = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -magnitude if nibble & 8 else magnitude


def e4m3(byte: int) -> Fraction | None:
    """OCP FP8 1.0: sign, four exponent bits of bias 7, three mantissa bits; all ones is NaN, given as None."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return None
    fraction = Fraction(mantissa, 8)
    magnitude = fraction * Fraction(1, 64) if exponent == 0 else (1 + fraction) * Fraction(2) ** (exponent - 7)
    return -magnitude if byte & 0x80 else magnitude


def elements(packed: torch.Tensor, batch: int) -> list[list[Fraction]]:
    """The rows of one batch of a packed e2m1 tensor, the low nibble of each byte first."""
    rows = packed.view(torch.uint8)[:, :, batch].tolist()
    return [[e2m1(nibble) for byte in row for nibble in (byte & 15, byte >> 4)] for row in rows]


def scales(scale: torch.Tensor, batch: int) -> list[list[Fraction | None]]:
    return [[e4m3(byte) for byte in row] for row in scale.view(torch.uint8)[:, :, batch].tolist()]


def slow_row(data: tuple, row: int, batch: int) -> list[float]:
    """One row of C by exact sums of fractions, as floats; NaN where a scale is NaN."""
    a, b, sfa, sfb = data[:4]
    left, left_scales = elements(a, batch)[row], scales(sfa, batch)[row]
    result = []
    for right, right_scales in zip(elements(b, batch), scales(sfb, batch), strict=True):
        if None in left_scales or None in right_scales:
            result.append(math.nan)
            continue
        products = (x * y for x, y in zip(left, right, strict=True))
        total = sum(product * left_scales[i // 16] * right_scales[i // 16] for i, product in enumerate(products))
        result.append(float(total))
    return result


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, for comparing NaN and types without an equality of their own."""
    return tensor.view(torch.int16 if tensor.dtype == torch.float16 else torch.uint8)


def contest_like(m: int = 128, n: int = 24, k: int = 64, l: int = 1, **options: object) -> tuple:  # noqa: E741
    return generate_input(m, n, k, l, 7, device="cpu", **options)


@pytest.mark.parametrize("kind", SCALE_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_equals_exact_sums(shape: tuple[int, int, int, int], kind: str) -> None:
    data = generate_input(*shape, seed=11, device="cpu", scales=kind)
    m, n, _, batches = shape
    assert ref_kernel(data).shape == (m, n, batches)
    for batch in range(batches):
        for row in sorted({0, m // 2, m - 1}):
            expected = torch.tensor(slow_row(data, row, batch), dtype=torch.float64).to(torch.float16)
            for dtype in (torch.float32, torch.float64):
                assert torch.equal(ref_kernel(data, dtype)[row, :, batch].nan_to_num(7), expected.nan_to_num(7)), dtype


def test_every_element_and_every_scale_decodes_exactly() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(256, 8).view(torch.float4_e2m1fn_x2)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).view(torch.float8_e4m3fn)
    numbers = dequantize(packed, scale, torch.float64).tolist()
    for byte in range(256):
        value = e4m3(byte)
        for position, number in enumerate(numbers[byte]):
            nibble = byte >> 4 if position % 2 else byte & 15
            assert math.isnan(number) if value is None else Fraction(number) == e2m1(nibble) * value, (byte, position)


def test_reference_in_chunks_equals_reference_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = contest_like(n=40)
    whole = ref_kernel(data)
    monkeypatch.setattr("reference._CHUNK_ELEMENTS", 64 * 7)
    assert torch.equal(ref_kernel(data), whole)


def test_reference_leaves_its_input_unchanged() -> None:
    data = contest_like()
    before = [tensor.clone() for tensor in data]
    output = ref_kernel(data)
    assert output.data_ptr() != data[6].data_ptr()
    assert all(torch.equal(raw(now), raw(was)) for now, was in zip(data, before, strict=True))


@pytest.mark.parametrize("shape", [(128, 256, 256, 1), (129, 8, 192, 3), (1, 136, 64, 2)], ids=str)
def test_layouts_are_those_of_the_contest(shape: tuple[int, int, int, int]) -> None:
    m, n, k, batches = shape
    a, b, sfa, sfb, sfa_permuted, sfb_permuted, c = generate_input(*shape, seed=1, device="cpu")
    for packed, scale, permuted, rows in ((a, sfa, sfa_permuted, m), (b, sfb, sfb_permuted, n)):
        assert packed.dtype == torch.float4_e2m1fn_x2
        assert (packed.shape, packed.stride()) == ((rows, k // 2, batches), (k // 2, 1, rows * k // 2))
        assert scale.dtype == permuted.dtype == torch.float8_e4m3fn
        assert (scale.shape, scale.stride()) == ((rows, k // 16, batches), (k // 16, 1, rows * k // 16))
        row_atoms, block_atoms = math.ceil(rows / 128), math.ceil(k / 64)
        assert permuted.shape == (32, 4, row_atoms, 4, block_atoms, batches)
        strides = (16, 4, 512 * block_atoms, 1, 512, 512 * block_atoms * row_atoms)
        assert permuted.stride() == strides
    assert c.dtype == torch.float16
    assert (c.shape, c.stride()) == ((m, n, batches), (n, 1, m * n))


@pytest.mark.parametrize("kind", SCALE_KINDS)
def test_permuted_scales_hold_the_reference_scales(kind: str) -> None:
    m, n, k, batches = 129, 40, 144, 2
    data = generate_input(m, n, k, batches, 5, device="cpu", scales=kind)
    for scale, permuted, rows in ((data[2], data[4], m), (data[3], data[5], n)):
        wanted = scale.view(torch.uint8).tolist()
        found = permuted.view(torch.uint8)
        memory = found.permute(5, 2, 4, 0, 1, 3)
        assert memory.is_contiguous()
        atoms = memory.reshape(batches, -(-rows // 128), -(-k // 64), 512).tolist()
        for batch in range(batches):
            for row in range(rows):
                for block in range(k // 16):
                    byte = wanted[row][block][batch]
                    offset = (row % 32) * 16 + ((row // 32) % 4) * 4 + block % 4
                    assert atoms[batch][row // 128][block // 4][offset] == byte
                    assert found[row % 32, row // 32 % 4, row // 128, block % 4, block // 4, batch] == byte


def test_places_outside_the_problem_are_random() -> None:
    permuted = generate_input(1, 8, 64, 1, 3, device="cpu")[4].view(torch.uint8)
    outside = permuted.permute(2, 1, 0, 4, 3, 5).reshape(128, 4)[1:]
    assert len(outside.unique()) > 200


def test_contest_input_is_uniform_and_its_scales_are_0_to_3() -> None:
    a, _, sfa, _, _, _, c = generate_input(256, 8, 4096, 1, 1111, device="cpu")
    counts = torch.bincount(a.view(torch.uint8).flatten().int(), minlength=256).double()
    expected = a.numel() / 256
    assert ((counts - expected).abs() < 6 * expected**0.5).all()
    values, counts = sfa.float().unique(return_counts=True)
    assert values.tolist() == [0, 1, 2, 3]
    assert ((counts - sfa.numel() / 4).abs() < 6 * sfa.numel() ** 0.5).all()
    assert c.float().std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 16, 32, 64, 128])
def test_distinct_scales_change_under_every_shift_of_a_power_of_two(shift: int) -> None:
    data = generate_input(260, 300, 16 * 260, 3, 9, device="cpu", scales="distinct")
    for scale in (data[2].view(torch.uint8), data[3].view(torch.uint8)):
        assert (scale[shift:] != scale[:-shift]).all()
        assert (scale[:, shift:] != scale[:, :-shift]).all()
    assert (data[2].view(torch.uint8)[:, :, :2] != data[2].view(torch.uint8)[:, :, 1:]).all()


def test_bit_patterns_are_all_there_and_give_every_kind_of_result() -> None:
    data = generate_input(64, 64, 128, 1, 2, device="cpu", scales="bits")
    for scale in data[2:4]:
        assert set(scale.view(torch.uint8).flatten().tolist()) == {0x00, 0x01, 0x7E, 0x7F, 0x80, 0xFF}
    c = ref_kernel(data).float()
    assert c.isposinf().any() and c.isneginf().any() and c.isnan().any()
    assert ((c.abs() > 1) & c.isfinite()).sum() > 500


def test_same_seed_same_input_and_other_seed_other_input() -> None:
    first, again, other = (generate_input(128, 8, 64, 1, seed, device="cpu") for seed in (4, 4, 5))
    for x, y, z in zip(first, again, other, strict=True):
        assert torch.equal(raw(x), raw(y))
        assert not torch.equal(raw(x), raw(z))


def test_input_does_not_draw_from_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    contest_like()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"m": 0}, ValueError, "m is 0; at least 1"),
        ({"n": -8}, ValueError, "n is -8; at least 1"),
        ({"l": 0}, ValueError, "l is 0; at least 1"),
        ({"k": 100}, ValueError, "k is 100; a multiple of 16"),
        ({"k": 64.0}, TypeError, "k must be an int, not float"),
        ({"m": True}, TypeError, "m must be an int, not bool"),
        ({"seed": -1}, ValueError, "seed is -1; at least 0"),
        ({"scales": "random"}, ValueError, "scales is 'random'; one of contest, distinct, bits"),
    ],
)
def test_bad_arguments_are_named(changes: dict, error: type[Exception], text: str) -> None:
    arguments = {"m": 128, "n": 8, "k": 64, "l": 1, "seed": 0, "device": "cpu"} | changes
    with pytest.raises(error, match=text):
        generate_input(**arguments)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize(("operand", "axis"), [(2, 0), (3, 1)], ids=["sfa", "sfb"])
def test_nan_scale_poisons_exactly_its_row_or_column(byte: int, operand: int, axis: int) -> None:
    data = contest_like(m=40, n=24, l=2)
    data[operand].view(torch.uint8)[5, 3, 1] = byte
    nan = ref_kernel(data).isnan()
    expected = torch.zeros_like(nan)
    expected[:, :, 1].select(axis, 5).fill_(True)
    assert torch.equal(nan, expected)


@pytest.mark.parametrize("operand", [2, 3], ids=["sfa", "sfb"])
def test_negative_zero_scale_is_zero(operand: int) -> None:
    data = contest_like()
    data[operand].view(torch.uint8).fill_(0x80)
    assert torch.equal(ref_kernel(data), torch.zeros(128, 24, 1, dtype=torch.float16))


def test_sums_beyond_fp16_are_infinite_and_match() -> None:
    data = contest_like(m=2, n=8)
    data[0].view(torch.uint8).fill_(0x77)  # 6 and 6
    data[1].view(torch.uint8).fill_(0x77)
    data[1].view(torch.uint8)[3].fill_(0xFF)  # -6 and -6
    for operand in (2, 3):
        data[operand].view(torch.uint8).fill_(0x7E)  # 448
    output = ref_kernel(data)
    expected = torch.full((2, 8, 1), math.inf)
    expected[:, 3] = -math.inf
    assert torch.equal(output.float(), expected)
    assert check_implementation(data, output) == (True, "largest error 0")
    assert not check_implementation(data, output.nan_to_num())[0]  # the largest finite fp16 instead of infinity
    assert not check_implementation(data, -output)[0]


def test_right_output_passes() -> None:
    data = contest_like()
    assert check_implementation(data, ref_kernel(data)) == (True, "largest error 0")
    data[6].copy_(ref_kernel(data, torch.float64))
    assert check_implementation(data, data[6])[0]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda c: [], "the output is a list, expected a torch.Tensor"),
        (lambda c: None, "the output is a NoneType"),
        (lambda c: c.numpy(), "the output is a ndarray"),
        (lambda c: torch.nn.Parameter(c), "the output is a Parameter"),
        (lambda c: c.float(), "dtype is torch.float32, expected torch.float16"),
        (lambda c: c.to(torch.bfloat16), "dtype is torch.bfloat16"),
        (lambda c: c[:, :, 0], r"shape is \(128, 24\), expected \(128, 24, 1\)"),
        (lambda c: c.transpose(0, 1), r"shape is \(24, 128, 1\)"),
        (lambda c: c[:0], r"shape is \(0, 24, 1\)"),
        (lambda c: c.to("meta"), "device is meta, expected cpu"),
        (lambda c: c.to_sparse(), "layout is torch.sparse_coo"),
        (lambda c: torch.zeros_like(c), "elements mismatch"),
        (lambda c: torch.full_like(c, math.nan), "3072 of 3072 elements mismatch"),
        (lambda c: c.roll(1, 0), "elements mismatch"),
    ],
)
def test_wrong_output_fails(spoil: Callable, text: str) -> None:
    data = contest_like()
    good, message = check_implementation(data, spoil(ref_kernel(data)))
    assert not good
    assert re.search(text, message), message


def test_one_wrong_element_at_the_last_place_is_named() -> None:
    data = contest_like(l=2)
    output = ref_kernel(data)
    right = output[-1, -1, -1].item()
    output[-1, -1, -1] = 12345
    good, message = check_implementation(data, output)
    assert not good
    assert message == f"1 of 6144 elements mismatch: C[127, 23, 1] is 12344, expected {right:g}"


def test_only_the_first_mismatches_are_shown() -> None:
    expected = torch.zeros(2, 4, 1, dtype=torch.float16)
    message = compare(expected + 1, expected)[1]
    assert message.startswith("8 of 8 elements mismatch: C[0, 0, 0] is 1, expected 0; C[0, 1, 0] is 1, expected 0;")
    assert message.count("expected") == 5 and message.endswith("; ...")


@pytest.mark.parametrize("where", [(3, 4, 0), (3, 5, 0)], ids=["missing", "extra"])
def test_nan_must_match_nan(where: tuple[int, int, int]) -> None:
    data = contest_like(m=8, n=8)
    data[2].view(torch.uint8)[3, 0, 0] = 0x7F
    output = ref_kernel(data)
    assert check_implementation(data, output)[0]
    output[where] = 0
    assert check_implementation(data, output)[1].startswith("1 of 64 elements mismatch: C[3, ")
    output[where] = math.nan
    output[0, 0, 0] = math.nan
    assert check_implementation(data, output)[1].startswith("1 of 64 elements mismatch: C[0, 0, 0] is nan")


@pytest.mark.parametrize(
    ("value", "error", "passes"), [(0, 0.0009, True), (0, 0.0012, False), (1000, 1, True), (1000, 1.5, False)]
)
def test_tolerance_is_absolute_plus_relative(value: float, error: float, passes: bool) -> None:
    expected = torch.full((1, 8, 1), value, dtype=torch.float16)
    output = expected.clone()
    output[0, 2, 0] += error
    assert compare(output, expected)[0] is passes
