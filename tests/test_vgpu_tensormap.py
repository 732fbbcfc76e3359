"""Tensor maps against maps encoded by the CUDA driver, field by field, and every constraint of the host API."""

import json
from pathlib import Path

import numpy as np
import pytest

from vgpu import tensormap
from vgpu.errors import VirtualGpuError

SAMPLES = json.loads((Path(__file__).parent / "data" / "tensormap_samples.json").read_text())["samples"]
ACCEPTED = [s for s in SAMPLES if not s["err"]]
REFUSED = [s for s in SAMPLES if s["err"]]
# the driver's names by enumerator (CUtensorMapDataType) and bits per element
DRIVER_TYPES = {0: ("u8", 8), 1: ("u16", 16), 2: ("u32", 32), 3: ("s32", 32), 4: ("u64", 64), 5: ("s64", 64),
                6: ("f16", 16), 7: ("f32", 32), 8: ("f64", 64), 9: ("bf16", 16), 10: ("f32.ftz", 32),
                11: ("tf32", 32), 12: ("tf32.ftz", 32), 13: ("b4x16", 4)}
BASE = 0x7F0012340000


def encode_sample(s: dict) -> bytes:
    return tensormap.encode_tiled(s["dtype"], s["addr"], s["dims"], s["strides"], s["box"], s["estr"], s["interleave"],
                                  s["swizzle"], s["l2"], s["oob"])


def good(**changes) -> dict:
    """Arguments of `encode` for a map that is fine."""
    out = dict(type="f16", address=BASE, sizes=(256, 64, 8), strides=(512, 32768), box=(64, 8, 2),
               element_strides=(1, 1, 1), interleave=0, swizzle=128, l2_promotion=0, fill_nan=False)
    return out | changes


def qword(data: bytes, index: int) -> int:
    return int.from_bytes(data[8 * index:8 * index + 8], "little")


def with_bits(data: bytes, low: int, width: int, value: int) -> bytes:
    bits = int.from_bytes(data, "little")
    mask = (1 << width) - 1 << low
    return (bits & ~mask | value << low).to_bytes(len(data), "little")


def test_all_samples_are_here():
    assert len(SAMPLES) == 68 and len(REFUSED) == 10


@pytest.mark.parametrize("sample", ACCEPTED, ids=range(len(ACCEPTED)))
def test_encode_reproduces_the_driver(sample):
    assert encode_sample(sample)[:64] == bytes.fromhex(sample["hex"])[:64]


@pytest.mark.parametrize("sample", ACCEPTED, ids=range(len(ACCEPTED)))
def test_decode_gives_the_arguments_back(sample):
    tm = tensormap.decode(bytes.fromhex(sample["hex"]))
    name, bits = DRIVER_TYPES[sample["dtype"]]
    assert (tm.type.name, tm.type.bits, tm.address) == (name, bits, sample["addr"])
    assert tm.rank == len(sample["dims"]) and list(tm.sizes) == sample["dims"]
    assert list(tm.strides) == sample["strides"] and list(tm.box) == sample["box"]
    assert list(tm.element_strides) == sample["estr"]
    assert tm.interleave == (0, 16, 32)[sample["interleave"]]
    assert tm.swizzle == (0, 32, 64, 128)[sample["swizzle"]]
    assert tm.l2_promotion == (0, 64, 128, 256)[sample["l2"]] and tm.fill_nan == bool(sample["oob"])


@pytest.mark.parametrize("sample", REFUSED, ids=range(len(REFUSED)))
def test_what_the_driver_refused_is_refused(sample):
    """But for what the H200 lacks and the B200 has (compute capability 10.0): the packed 4- and 6-bit types, larger
    atoms of the 128-byte swizzle."""
    if sample["dtype"] in (13, 14, 15):
        tm = tensormap.decode(encode_sample(sample))
        assert tm.type.name == ("b4x16", "b4x16_p64", "b6x16_p32")[sample["dtype"] - 13]
        assert list(tm.box) == sample["box"]
        return
    if sample["swizzle"] in (4, 6):
        tm = tensormap.decode(encode_sample(sample))
        assert (tm.swizzle, tm.swizzle_atom) == (128, 32 if sample["swizzle"] == 4 else 64)
        return
    with pytest.raises(VirtualGpuError) as error:
        encode_sample(sample)
    assert error.value.kind in ("tensor map", "unsupported")


@pytest.mark.parametrize("changes, message", [
    (dict(sizes=(192, 64)), "size of dimension 0: 192 of type b4x16_p64; must be a multiple of 128"),
    (dict(box=(64, 8)), "box of dimension 0: 64 of type b4x16_p64; must be 128"),
    (dict(swizzle=64), "swizzle: 64 bytes"), (dict(strides=(80,)), "stride of dimension 1: 80 bytes"),
    (dict(address=BASE + 16), "global address"), (dict(fill_nan=True), "out-of-bounds fill"),
])
def test_constraints_of_types_with_gaps(changes, message):
    fields = dict(type="b4x16_p64", address=BASE, sizes=(256, 64), strides=(128,), box=(128, 8), swizzle=128)
    tensormap.encode(**fields)
    with pytest.raises(VirtualGpuError) as error:
        tensormap.encode(**fields | changes)
    assert error.value.kind == "tensor map" and message in error.value.message


def test_packed_type_is_code_11():
    data = tensormap.encode("b4x16", BASE, (512, 64), (256,), (256, 8), swizzle=128)
    assert qword(data, 1) >> 7 & 15 == 11
    assert qword(data, 4) & 0xFFFFFFFF == 511 and qword(data, 6) >> 56 == 255


def test_bytes_after_the_first_64_and_hints_are_ignored():
    data = tensormap.encode(**good())
    rest = bytes(range(64))
    plain = tensormap.decode(data)
    assert tensormap.decode(data[:64] + rest) == plain
    assert tensormap.decode(data[:64]) == plain
    assert tensormap.decode(np.frombuffer(data, np.uint8)) == plain
    assert tensormap.decode(with_bits(data, 64, 4, 2)) == plain  # as CuTeDSL's host code marks its maps
    assert tensormap.decode(with_bits(data, 85, 1, 1)) == plain  # 128 KiB of memory follow


def test_decoded_maps_are_cached():
    data = tensormap.encode(**good())
    assert tensormap.decode(data) is tensormap.decode(bytearray(data))


@pytest.mark.parametrize("changes, message", [
    (dict(type="f8"), "element type: f8; must be one of u8, u16"),
    (dict(sizes=(), strides=(), box=(), element_strides=()), "rank: 0; must be 1 to 5"),
    (dict(sizes=(8,) * 6, strides=(16,) * 5, box=(8,) * 6, element_strides=(1,) * 6), "rank: 6; must be 1 to 5"),
    (dict(strides=(512,)), "strides: 1 of them for rank 3; must be 2 of them"),
    (dict(box=(64, 8)), "box: 2 of them for rank 3; must be 3 of them"),
    (dict(element_strides=(1, 1)), "element strides: 2 of them for rank 3; must be 3 of them"),
    (dict(interleave=8), "interleave: 8 bytes; must be one of 0, 16, 32"),
    (dict(swizzle=96), "swizzle: 96 bytes; must be one of 0, 32, 64, 128"),
    (dict(l2_promotion=512), "L2 promotion: 512 bytes; must be one of 0, 64, 128, 256"),
    (dict(address=BASE + 8), "global address: 0x7f0012340008; must be a 64-bit multiple of 16"),
    (dict(address=-16), "global address: -0x10; must be a 64-bit multiple of 16"),
    (dict(address=BASE + 16, interleave=32), "global address: 0x7f0012340010; must be a 64-bit multiple of 32"),
    (dict(sizes=(256, 0, 8)), "size of dimension 1: 0; must be 1 to 2**32"),
    (dict(sizes=(256, 64, 2**32 + 1)), "size of dimension 2: 4294967297; must be 1 to 2**32"),
    (dict(type="b4x16", sizes=(255, 64, 8), box=(256, 8, 1)), "size of dimension 0: 255 of packed 4-bit elements; must "
     "be even"),
    (dict(strides=(520, 32768)), "stride of dimension 1: 520 bytes; must be a multiple of 16 below 2**40"),
    (dict(strides=(512, 2**40)), "stride of dimension 2: 1099511627776 bytes; must be a multiple of 16 below 2**40"),
    (dict(strides=(512, -16)), "stride of dimension 2: -16 bytes; must be a multiple of 16 below 2**40"),
    (dict(strides=(528, 32768), interleave=32), "stride of dimension 1: 528 bytes; must be a multiple of 32"),
    (dict(box=(64, 257, 1)), "box of dimension 1: 257; must be 1 to 256"),
    (dict(box=(64, 8, 0)), "box of dimension 2: 0; must be 1 to 256"),
    (dict(element_strides=(1, 9, 1)), "element stride of dimension 1: 9; must be 1 to 8"),
    (dict(element_strides=(1, 1, 0)), "element stride of dimension 2: 0; must be 1 to 8"),
    (dict(box=(60, 8, 1)), "box of dimension 0: 60 elements, 120 bytes; must be a multiple of 16 bytes"),
    (dict(type="b4x16", box=(33, 8, 1)), "box of dimension 0: 33 elements, 16.5 bytes; must be a multiple of 16"),
    (dict(swizzle=64), "box of dimension 0: 128 bytes; must be at most the 64 bytes of the swizzle"),
    (dict(swizzle=32), "box of dimension 0: 128 bytes; must be at most the 32 bytes of the swizzle"),
    (dict(box=(128, 8, 1)), "box of dimension 0: 256 bytes; must be at most the 128 bytes of the swizzle"),
    (dict(box=(64, 256, 8)), "box: 262144 bytes; must be at most 232448 bytes of shared memory"),
    (dict(type="u16", fill_nan=True), "out-of-bounds fill: NaN with element type u16; must be zero"),
    (dict(type="b4x16", fill_nan=True), "out-of-bounds fill: NaN with element type b4x16; must be zero"),
    (dict(sizes=(256, 64), strides=(512,), box=(64, 8), element_strides=(1, 1), interleave=16),
     "rank: 2 with 16-byte interleave; must be 3 to 5"),
])
def test_constraints(changes, message):
    with pytest.raises(VirtualGpuError) as error:
        tensormap.encode(**good(**changes))
    assert error.value.kind == "tensor map" and message in error.value.message


@pytest.mark.parametrize("arguments, kind, message", [
    (dict(type=14), "tensor map", "box of dimension 0: 64 of type b4x16_p64; must be 128"),
    (dict(type=16), "tensor map", "element type: 16; must be 0 to 15"),
    (dict(swizzle=5), "unsupported", "swizzle 5"), (dict(swizzle=7), "tensor map", "swizzle: 7"),
    (dict(interleave=3), "tensor map", "interleave: 3"), (dict(l2_promotion=4), "tensor map", "L2 promotion: 4"),
    (dict(oob_fill=2), "tensor map", "out-of-bounds fill: 2; must be 0 to 1"),
])
def test_driver_enumerators(arguments, kind, message):
    call = dict(type=6, address=BASE, sizes=(256, 64), strides=(512,), box=(64, 8), element_strides=(1, 1))
    assert tensormap.encode_tiled(**call) == tensormap.encode("f16", BASE, (256, 64), (512,), (64, 8))
    with pytest.raises(VirtualGpuError) as error:
        tensormap.encode_tiled(**call | arguments)
    assert error.value.kind == kind and message in error.value.message


@pytest.mark.parametrize("low, width, value, kind, message", [
    (64, 4, 1, "tensor map", "low four bits of quadword 1: 1"), (64, 4, 15, "tensor map", "low four bits"),
    (68, 3, 5, "tensor map", "rank: 6"), (68, 3, 7, "tensor map", "rank: 8"),
    *[(71, 4, code, "tensor map", f"element type: code {code}") for code in (14, 15)],
    (80, 1, 1, "tensor map", "element type: code 6 with the tf32 bit"), (75, 2, 3, "tensor map", "interleave: code 3"),
    (83, 2, 2, "unsupported", "flipped 8-byte halves"),
    (86, 10, 3, "unsupported", "bits [86, 87]"), (255, 1, 1, "unsupported", "bits [255]"),
    (431, 9, 1, "unsupported", "bits [431]"), (480, 32, 1 << 31, "unsupported", "bits [511]"),
    (0, 64, BASE + 4, "tensor map", "global address"), (440, 8, 2, "tensor map", "box of dimension 0: 3 elements"),
])
def test_decode_refuses_what_it_does_not_know(low, width, value, kind, message):
    data = with_bits(tensormap.encode(**good()), low, width, value)
    with pytest.raises(VirtualGpuError) as error:
        tensormap.decode(data)
    assert error.value.kind == kind and message in error.value.message


def test_decode_checks_length_and_address():
    data = tensormap.encode(**good())
    assert tensormap.decode(data, address=0x1040).address == BASE
    with pytest.raises(VirtualGpuError, match="length: 63 bytes"):
        tensormap.decode(data[:63])
    with pytest.raises(VirtualGpuError, match="must be a multiple of 64") as error:
        tensormap.decode(data, address=0x1020)
    assert error.value.kind == "misaligned"


REPLACEMENTS = [
    ("global_address", None, BASE + 0x100, dict(address=BASE + 0x100)),
    ("box_dim", 0, 32, dict(box=(32, 8, 2))), ("box_dim", 2, 4, dict(box=(64, 8, 4))),
    ("global_dim", 0, 128, dict(sizes=(128, 64, 8))), ("global_dim", 1, 77, dict(sizes=(256, 77, 8))),
    ("global_dim", 2, 0xFFFFFFFF, dict(sizes=(256, 64, 0xFFFFFFFF))),
    ("global_stride", 0, 1024, dict(strides=(1024, 32768))),
    ("global_stride", 1, 2**40 - 16, dict(strides=(512, 2**40 - 16))),
    ("element_stride", 1, 3, dict(element_strides=(1, 3, 1))),
    ("interleave_layout", None, 1, dict(interleave=16)),
    ("swizzle_mode", None, 0, dict(swizzle=0)), ("swizzle_atomicity", None, 0, {}),
    ("swizzle_atomicity", None, 1, dict(swizzle_atom=32)), ("swizzle_atomicity", None, 3, dict(swizzle_atom=64)),
    ("fill_mode", None, 1, dict(fill_nan=True)),
    *[("elemtype", None, number, dict(type=name)) for number, name in ((1, "u16"), (6, "f16"), (10, "bf16"))],
]


@pytest.mark.parametrize("field, ordinal, value, changes", REPLACEMENTS,
                         ids=[f"{r[0]}{r[1]}-{r[2]}" for r in REPLACEMENTS])
def test_replace_field(field, ordinal, value, changes):
    before = tensormap.encode(**good())
    after = tensormap.replace_field(before, field, ordinal, value)
    assert len(after) == 128 and after == tensormap.encode(**good(**changes))
    assert (after != before) == (changes != {} and changes != dict(type="f16"))


@pytest.mark.parametrize("number, name", list(enumerate(
    ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz", "b4x16"])))
def test_replace_elemtype_numbers(number, name):
    """Table 36 of the PTX ISA numbers the types its own way."""
    start = tensormap.encode("tf32", BASE, (64, 64), (256,), (32, 8))
    assert tensormap.decode(tensormap.replace_field(start, "elemtype", None, number)).type.name == name


def test_a_map_can_be_built_from_zeros():
    """As kernels that make their maps on the device do."""
    data = bytes(128)
    steps = [("global_address", None, BASE), ("rank", None, 2), ("elemtype", None, 10), ("swizzle_mode", None, 2),
             ("interleave_layout", None, 0), ("swizzle_atomicity", None, 0), ("fill_mode", None, 1)]
    for i, (size, box) in enumerate(((4096, 32), (77, 16), (5, 3))):
        steps += [("global_dim", i, size), ("box_dim", i, box), ("element_stride", i, 1)]
    steps += [("global_stride", 0, 8192), ("global_stride", 1, 8192 * 80)]
    for step in steps:
        data = tensormap.replace_field(data, *step)
    assert data == tensormap.encode("bf16", BASE, (4096, 77, 5), (8192, 8192 * 80), (32, 16, 3), swizzle=64,
                                    fill_nan=True)


@pytest.mark.parametrize("field, ordinal, value, kind, message", [
    ("box_dim", 5, 1, "tensor map", "ordinal of box_dim: 5; must be 0 to 4"),
    ("global_stride", 4, 16, "tensor map", "ordinal of global_stride: 4; must be 0 to 3"),
    ("box_dim", None, 1, "tensor map", "ordinal of box_dim: None"), ("rank", 0, 1, "tensor map", "ordinal of rank: 0"),
    ("box_dim", 0, 257, "tensor map", "box_dim of dimension 0: 257"),
    ("global_dim", 1, 0, "tensor map", "global_dim of dimension 1: 0"),
    ("global_stride", 0, 24, "tensor map", "stride of dimension 1: 24 bytes"),
    ("element_stride", 0, 9, "tensor map", "element_stride of dimension 0: 9"),
    ("rank", None, 5, "tensor map", "rank: 5; must be 0 to 4"),
    ("global_address", None, 8, "tensor map", "global address: 0x8"),
    ("fill_mode", None, 2, "tensor map", "fill_mode: 2"), ("swizzle_mode", None, 5, "tensor map", "swizzle_mode: 5"),
    ("elemtype", None, 16, "tensor map", "elemtype: 16"), ("colour", None, 0, "tensor map", "field: colour"),
    ("swizzle_mode", None, 4, "unsupported", "96 bytes"), ("swizzle_atomicity", None, 2, "unsupported", "atomicity 2"),
    ("elemtype", None, 16, "tensor map", "elemtype: 16"),
])
def test_replace_field_refuses(field, ordinal, value, kind, message):
    with pytest.raises(VirtualGpuError) as error:
        tensormap.replace_field(tensormap.encode(**good()), field, ordinal, value)
    assert error.value.kind == kind and message in error.value.message


def test_geometry():
    """Sizes by hand: a box of 64 × ceil(8/3) × ceil(5/2) f16 elements."""
    tm = tensormap.decode(tensormap.encode(**good(box=(64, 8, 5), element_strides=(4, 3, 2))))
    g = tm.geometry
    assert g.counts == (64, 3, 3) and g.row_bytes == 128 and g.tile_bytes == 128 * 9
    assert g.shared_row == 128 and g.shared_bytes == 128 * 9
    assert g.shape == (3, 3, 128) and g.strides == (65536, 1536, 1)
    assert g.reach == 2 * 65536 + 2 * 1536 + 128
    assert g.last == (192, 57, 3)
    narrow = tensormap.decode(tensormap.encode(**good(box=(24, 8, 5)))).geometry
    assert (narrow.row_bytes, narrow.tile_bytes, narrow.shared_row, narrow.shared_bytes) == (48, 1920, 128, 5120)
    interleaved = tensormap.decode(tensormap.encode(**good(interleave=16)))
    with pytest.raises(VirtualGpuError, match="16-byte interleave") as error:
        _ = interleaved.geometry
    assert error.value.kind == "unsupported"
