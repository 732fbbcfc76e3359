"""submission.py, compiled for sm_100a and executed on the virtual B200, against float64 of the decoded operands."""

from dataclasses import replace

import pytest
import torch
from guarded import guard

import reference
import submission
import vgpu
from task import TEST_CASES

CONFIGS = {"128 columns": submission.CONFIG, "64 columns": submission.NARROW}
ORDERS = [("copies", 0), ("tensor", 0), ("random", 1)]


def use(monkeypatch, config):
    """Every problem is computed with ``config``."""
    monkeypatch.setattr(submission, "choose_config", lambda *sizes: config)
    monkeypatch.setattr(submission, "_prepared", ())  # records of the other configuration
    return config


@pytest.fixture(params=CONFIGS, autouse=True)
def config(request, monkeypatch):
    """Each configuration that can be chosen, for every size."""
    return use(monkeypatch, CONFIGS[request.param])


def run(m, n, k, l=1, seed=1, scales="distinct", order="copies", order_seed=0):  # noqa: E741
    """Run the kernel on guarded, poisoned C; returns (data, C), having checked the guards and the warnings."""
    device = vgpu.device()
    device.order, device.seed = order, order_seed
    data, guarded = guard(reference.generate_input(m, n, k, l, seed, "cpu", scales))
    before = [t.clone().view(torch.uint8) if t.dtype != torch.float16 else t for t in data[:6]]
    out = submission.custom_kernel(data)
    assert out is data[6]
    assert guarded.untouched(), "bytes around C were written"
    for old, new in zip(before, data[:6], strict=True):
        assert torch.equal(old, new.view(torch.uint8)), "an input was written"
    assert vgpu.last_launch().warnings == []
    return data, out


def assert_right(data, out):
    """Every element within fp16 rounding of the float64 result."""
    expected = reference.ref_kernel(data, dtype=torch.float64)
    good, message = reference.compare(out, expected.to(torch.float16))
    assert good, message


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: o[0])
@pytest.mark.parametrize(("rounds", "more"), [(0, 1), (1, -1), (1, 0), (1, 1), (2, 3)])
def test_k_tiles_around_the_number_of_stages(rounds, more, order, config):
    k = (rounds * config.stages + more) * config.tile_k
    assert_right(*run(128, 128, k, order=order[0], order_seed=order[1]))


@pytest.mark.parametrize("k", [64, 128, 192, 320, 1088])
def test_k_not_a_multiple_of_the_tile(k):
    assert_right(*run(128, 136, k))


@pytest.mark.parametrize("m", [1, 2, 127, 128, 129, 257])
@pytest.mark.parametrize("n", [8, 136])
def test_partial_tiles(m, n):
    assert_right(*run(m, n, 448))


@pytest.mark.parametrize("size", [(72, 200, 320, 3), (200, 72, 320, 3), (129, 8, 64, 2)], ids=str)
def test_batches_with_m_different_from_n(size):
    assert_right(*run(*size))


@pytest.mark.parametrize("operand", [0, 1], ids=["a", "b"])
def test_every_e2m1_value_in_order(operand):
    """One operand holds each of the 16 numbers, the other a single 1.0 a row: C shows which number is where."""
    m = n = 128
    k = 128
    a, b, sfa_ref, sfb_ref, sfa, sfb, c = reference.generate_input(m, n, k, 1, 3, "cpu", "contest")
    for scale in (sfa_ref, sfb_ref, sfa, sfb):
        scale.view(torch.uint8).fill_(0x38)  # 1.0
    values, ones = (a, b) if operand == 0 else (b, a)
    codes = (torch.arange(128)[:, None] * 7 + torch.arange(k)[None, :] * 3) % 16
    values.view(torch.uint8)[:, :, 0] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    picks = torch.arange(128) % k
    unit = torch.zeros(128, k, dtype=torch.int64)
    unit[torch.arange(128), picks] = 2  # the code of 1.0
    ones.view(torch.uint8)[:, :, 0] = (unit[:, 0::2] | unit[:, 1::2] << 4).to(torch.uint8)
    out = submission.custom_kernel((a, b, sfa_ref, sfb_ref, sfa, sfb, c))[:, :, 0]
    magnitude = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([magnitude, -magnitude])
    expected = table[codes[:, picks]]  # [value row, unit row]
    assert torch.equal(out.float() if operand == 0 else out.float().T, expected)


def test_scale_bit_patterns_and_nan():
    """0x00, 0x01, 0x7e, 0x7f, 0x80, 0xff: a NaN scale poisons exactly its row or column."""
    data, out = run(192, 136, 256, scales="bits")
    nan = torch.isnan(out[:, :, 0])
    expected = torch.zeros_like(nan)
    expected[96, :] = True
    expected[:, 68] = True
    assert torch.equal(nan, expected)
    good, message = reference.compare(out, reference.ref_kernel(data, dtype=torch.float64).to(torch.float16))
    assert good, message


@pytest.mark.parametrize("which", [4, 5], ids=["sfa", "sfb"])
@pytest.mark.parametrize("code", [0x00, 0x01, 0x7E, 0x80])
def test_one_scale_code_everywhere(which, code):
    data = reference.generate_input(128, 128, 128, 1, 5, "cpu", "contest")
    for t in (data[which], data[which - 2]):
        t.view(torch.uint8).fill_(code)
    out = submission.custom_kernel(data)
    good, message = reference.compare(out, reference.ref_kernel(data, dtype=torch.float64).to(torch.float16))
    assert good, message


def test_exact_mode_differs_by_rounding_only():
    """The measured arithmetic (35 fractional bits, toward zero) against float64, in float32 before fp16: C of small
    magnitude, so that fp16 keeps more bits than the difference of the modes."""
    vgpu.device().exact = True
    assert_right(*run(128, 128, 512))


def test_same_bits_in_every_order():
    bits = []
    for order, seed in [*ORDERS, ("random", 2), ("random", 3)]:
        _, out = run(130, 136, 1856, order=order, order_seed=seed)
        bits.append(out.clone().view(torch.int16))
    assert all(torch.equal(bits[0], b) for b in bits[1:])


def test_counted_work(config):
    """Bytes, MMAs and cycles of a problem of 2 x 384 / tile_n tiles and 2 k-tiles, counted by hand."""
    run(256, 384, 512)
    counters = vgpu.last_launch().counters
    tiles, k_tiles = {128: 6, 64: 12}[config.tile_n], 2
    stage = {128: 2 * 16384 + 2 * 2048, 64: 16384 + 8192 + 2 * 2048}[config.tile_n]  # A, B, SFA, SFB
    assert counters["ctas"] == tiles
    assert counters["tma_load_bytes"] == tiles * k_tiles * stage
    assert counters["tma_load_instructions"] == tiles * k_tiles * 4
    assert counters["mma_instructions"] == tiles * k_tiles * 4
    assert counters["mma_cycles"] == tiles * k_tiles * 4 * {128: 64, 64: 48}[config.tile_n]  # SEMI
    assert counters["mma_flops"] == 2 * 256 * 384 * 512
    assert counters["tma_store_bytes"] == 256 * 384 * 2
    assert counters["tma_store_instructions"] == 256 * 384 // (32 * 64)  # 32 rows of 64 columns each
    assert counters["global_store_bytes"] == 0
    moved = counters["tma_load_bytes"] + counters["tma_store_bytes"]
    assert sum(counters["tma_bytes_by_tensor"].values()) == moved
    assert set(counters["units_by_warp"]["5"]) == {"TMA load"}


def test_compiled_once_for_many_calls(monkeypatch):
    run(128, 128, 256)
    monkeypatch.setattr(submission.cute, "compile", lambda *a, **k: pytest.fail("compiled again"))
    run(64, 136, 320, 2)
    run(128, 128, 256)


@pytest.mark.parametrize("size", [(1, 8), (31, 72), (33, 64), (96, 120), (97, 184), (160, 200)], ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=lambda o: o[0])
def test_a_warps_last_store_is_clipped(size, order):
    """Rows and columns that end before, in and after a warp's piece of 32 x 64: nothing outside C is written."""
    assert_right(*run(*size, 256, 2, order=order[0], order_seed=order[1]))


@pytest.mark.parametrize("columns", [16, 32])
def test_other_widths_of_a_store(columns, config, monkeypatch):
    use(monkeypatch, replace(config, store_columns=columns))
    assert_right(*run(129, 200, 320))


@pytest.mark.parametrize("stages", [1, 2])
def test_c_fits_into_few_stages(stages, config, monkeypatch):
    """C's pieces lie over the stages, down to one."""
    few = use(monkeypatch, replace(config, shared_memory=1024 + stages * config.stage_bytes))
    assert few.stages == stages
    assert_right(*run(128, 128, 832))


@pytest.mark.parametrize("n", [64, 72, 192, 264, 320])
def test_tiles_that_share_an_atom_of_sfb(n):
    """Tiles of 64 columns begin in the middle of an atom of 128 scales' rows, or end there."""
    assert_right(*run(130, n, 832, 2))


@pytest.mark.contest
@pytest.mark.parametrize("case", TEST_CASES, ids=lambda c: f"{c['m']}x{c['n']}x{c['k']}")
def test_contest_case(case):
    data, guarded = guard(reference.generate_input(case["m"], case["n"], case["k"], case["l"], case["seed"], "cpu"))
    out = submission.custom_kernel(data)
    good, message = reference.check_implementation(data, out)
    assert good, message
    assert guarded.untouched()
