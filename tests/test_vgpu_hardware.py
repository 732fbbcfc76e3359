"""The virtual GPU against a real one: every probe's PTX must give what the H200 gave, bit for bit.

The goldens are in probes/golden, captured by probes/capture.py. A missing or outdated golden is a failure, not a skip.
Only the instructions that PTX itself calls approximate are compared within the error bounds that it documents.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from probes import all_probes
from probes.goldens import FOLDER, PROVENANCE, Golden, GoldenError, golden_of, read
from probes.model import Buffer, Probe, Row, Scalar, TensorMap

import vgpu
from vgpu.tensormap import encode

PROBES = all_probes()
GROUPS = sorted({probe.group for probe in PROBES})

# Probes of what the virtual GPU does not model, and why. Each must stop with an error that says so.
UNSUPPORTED: dict[str, str] = {}
FLOATS = {"f16": np.float16, "f32": np.float32}


@functools.cache
def group_goldens(group: str) -> tuple[dict[str, str], dict[str, Golden]]:
    """Provenance and goldens of one group."""
    return read(FOLDER / f"{group}.json")


def hardware(probe: Probe) -> Golden:
    """The probe's golden, up to date, and without an error unless the probe asks for one."""
    golden = golden_of(probe, group_goldens(probe.group)[1])
    if golden.error is not None and not probe.may_stop:
        raise GoldenError(f"{probe.name}: the capture failed: {golden.error}")
    return golden


def aligned(data: bytes) -> np.ndarray:
    """uint8 copy of `data` at an address that is a multiple of 256, as cuMemAlloc's are."""
    room = np.zeros(len(data) + 256, np.uint8)
    start = -room.ctypes.data % 256
    out = room[start:start + len(data)]
    out[:] = np.frombuffer(data, np.uint8)
    return out


def encoded_map(spec: TensorMap) -> bytes:
    """The map of a probe that stopped: its golden has none (the driver's own encoding is tested elsewhere)."""
    kind = spec.dtype.replace("_ftz", ".ftz")
    swizzle = 0 if spec.swizzle == "none" else int(spec.swizzle.rstrip("B"))
    return encode(kind, 0, spec.dims, spec.strides, spec.box, spec.element_strides, swizzle=swizzle,
                  fill_nan=spec.nan_fill)


def run_virtual(probe: Probe, maps: list[bytes]) -> list[bytes]:
    """Launch the probe on the virtual GPU with the driver's tensor maps, their addresses replaced; its outputs."""
    maps = maps or [encoded_map(arg) for arg in probe.args if isinstance(arg, TensorMap)]
    buffers = {i: aligned(arg.data) for i, arg in enumerate(probe.args) if isinstance(arg, Buffer)}
    encoded = iter(maps)
    values = []
    for i, arg in enumerate(probe.args):
        if isinstance(arg, TensorMap):
            address = buffers[arg.buffer].ctypes.data + arg.offset
            values.append(address.to_bytes(8, "little") + next(encoded)[8:])
        elif isinstance(arg, Scalar):
            values.append(arg.value)
        else:
            values.append(buffers[i])
    vgpu.launch(probe.ptx, "probe", probe.grid, probe.block, values, cluster=probe.cluster,
                shared_bytes=probe.shared_bytes)
    return [buffers[i].tobytes() for i, arg in enumerate(probe.args) if isinstance(arg, Buffer) and arg.output]


def as_floats(words: np.ndarray, kind: str) -> np.ndarray:
    """Values of 16- or 32-bit words as float64; two columns for packed pairs."""
    if kind.endswith("x2"):
        return as_floats(words.astype("<u4").view("<u2"), kind[:-2])
    if kind == "bf16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return words.view(FLOATS[kind]).astype(np.float64)


def within(row: Row, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Which results are the hardware's, or within the row's bounds of them. Zeros, infinities and NaNs are exact."""
    same = got == want
    if row.kind == "exact":
        return same
    virtual, real = as_floats(got, row.kind), as_floats(want, row.kind)
    with np.errstate(invalid="ignore"):
        close = np.abs(virtual - real) <= row.relative * np.abs(real) + row.absolute
    close &= np.isfinite(real) & ~((real == 0) & (virtual == 0))
    if row.kind.endswith("x2"):
        halves = got.view("<u2") == want.view("<u2")
        return (halves | close).reshape(-1, 2).all(axis=1)
    return same | close


def row_differences(row: Row, outputs: list[bytes], golden: Golden) -> str | None:
    """What differs in one instruction's results, or None."""
    kind = np.dtype(f"<u{row.width // 8}")
    got, want = (np.frombuffer(side[row.output], kind, len(row.operands), row.offset)
                 for side in (outputs, golden.outputs))
    bad = np.flatnonzero(~within(row, got, want))
    if not len(bad):
        return None
    digits = row.width // 4
    shown = [f"    ({', '.join(f'{x:#x}' for x in row.operands[i])}): hardware {int(want[i]):#0{digits + 2}x}, "
             f"virtual {int(got[i]):#0{digits + 2}x}" for i in bad[:6]]
    return f"  {row.label}: {len(bad)} of {len(got)} differ\n" + "\n".join(shown)


def byte_differences(got: bytes, want: bytes, index: int) -> str | None:
    """What differs in one output as 32-bit words, or None."""
    a, b = (np.frombuffer(side.ljust(-(-len(side) // 4) * 4, b"\0"), "<u4") for side in (got, want))
    if len(a) != len(b):
        return f"  output {index}: {len(got)} bytes, hardware {len(want)}"
    bad = np.flatnonzero(a != b)
    if not len(bad):
        return None
    shown = [f"    word {i}: hardware {int(b[i]):#010x}, virtual {int(a[i]):#010x}" for i in bad[:12]]
    return f"  output {index}: {len(bad)} of {len(a)} words differ\n" + "\n".join(shown)


def differences(probe: Probe, outputs: list[bytes], golden: Golden) -> str:
    """Everything in which the virtual GPU's outputs are not the hardware's; empty if nothing."""
    if probe.rows:
        found = [row_differences(row, outputs, golden) for row in probe.rows]
    else:
        found = [byte_differences(a, b, i) for i, (a, b) in enumerate(zip(outputs, golden.outputs, strict=True))]
    return "\n".join(text for text in found if text)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_virtual_gpu_does_what_the_hardware_did(probe: Probe) -> None:
    golden = hardware(probe)
    if golden.error is not None and golden.error.startswith("cuTensorMapEncodeTiled"):
        assert not golden.maps and not golden.outputs  # no map, so nothing to launch with
        return
    if golden.error is not None or probe.name in UNSUPPORTED:
        with pytest.raises(vgpu.VirtualGpuError) as caught:
            run_virtual(probe, golden.maps)
        assert (caught.value.kind in ("unknown instruction", "unsupported")) == (probe.name in UNSUPPORTED)
        return
    text = differences(probe, run_virtual(probe, golden.maps), golden)
    assert not text, f"{probe.name}\n{text}"


def test_driver_refuses_fills_and_types_that_do_not_go_together() -> None:
    refused = {probe.name: hardware(probe).error for probe in PROBES
               if probe.name.startswith("stops/map_") and isinstance(probe.args[0], TensorMap)}
    assert len(refused) == 4
    assert set(refused.values()) == {"cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE"}


@pytest.mark.parametrize("group", GROUPS)
def test_golden_file_says_where_it_comes_from(group: str) -> None:
    provenance, goldens = group_goldens(group)
    assert set(provenance) == set(PROVENANCE) and all(provenance.values())
    assert provenance["compute_capability"] == "9.0"
    assert set(goldens) == {probe.name for probe in PROBES if probe.group == group}


def test_golden_files_are_those_of_the_probes() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == GROUPS


def test_unsupported_probes_exist() -> None:
    assert set(UNSUPPORTED) <= {probe.name for probe in PROBES}


def test_a_changed_probe_does_not_use_an_old_golden() -> None:
    probe = PROBES[0]
    goldens = group_goldens(probe.group)[1]
    changed = Probe(**{**probe.__dict__, "ptx": probe.ptx.replace("bar.sync 0;", "bar.sync 1;")})
    assert changed.ptx != probe.ptx
    for other in (changed, Probe(**{**probe.__dict__, "name": f"{probe.group}/unheard_of"})):
        with pytest.raises(GoldenError):
            golden_of(other, goldens)
    with pytest.raises(GoldenError):
        read(FOLDER / "unheard_of.json")


def test_comparison_sees_one_wrong_bit() -> None:
    probe = next(p for p in PROBES if p.name == "integer/arithmetic_32_lanes")
    golden = hardware(probe)
    wrong = bytearray(golden.outputs[0])
    wrong[4 * 128 + 8] ^= 1
    text = differences(probe, [bytes(wrong)], golden)
    assert text.startswith("  sub.s32 d, a, b: 1 of 128 differ") and text.count("hardware") == 1
