"""Plain bulk copies and reductions (PTX ISA, cp.async.bulk and cp.reduce.async.bulk) within one CTA."""

from __future__ import annotations

import numpy as np

from .assembler import Kernel
from .model import Buffer, Probe, Scalar, random_bytes
from .tma import POISON, float_pairs

IMAGE = 1024


def load_ptx(space: str) -> str:
    """Parameters: out, source, size. Two copies of `size` bytes, to shared offsets 0 and 512 - size."""
    k = Kernel("u64", "u64", "u32", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    out, source, size = k.pointer(0), k.pointer(1), k.scalar(2)
    barrier = k.b32(f"add.u32 $, {base}, {IMAGE};")
    k.fill_shared(base, str(IMAGE), hex(POISON))
    with k.thread(tid):
        k.barrier_init(barrier, 1)
    k("fence.proxy.async;", "bar.sync 0;")
    with k.thread(tid):
        expected = k.b32(f"shl.b32 $, {size}, 1;")
        k(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {expected};")
        second = k.b32(f"sub.u32 $, 512, {size};")
        second = k.b32(f"add.u32 $, {base}, {second};")
        later = k.b64(f"add.s64 $, {source}, 48;")
        for target, start in ((base, source), (second, later)):
            k(f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes [{target}], [{start}], {size}, [{barrier}];")
    k.wait(barrier, 0)
    k.shared_to_global(out, base, str(IMAGE))
    return k.text()


def store_ptx(operation: str | None = None) -> str:
    """Parameters: target, source, image bytes, size. Stores (or reduces) `size` shared bytes to target + 16."""
    k = Kernel("u64", "u64", "u32", "u32", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    target, source, image, size = k.pointer(0), k.pointer(1), k.scalar(2), k.scalar(3)
    k.global_to_shared(base, source, image)
    k("fence.proxy.async.shared::cta;", "bar.sync 0;")
    with k.thread(tid):
        start = k.b64(f"add.s64 $, {target}, 16;")
        name = "cp.reduce.async.bulk" if operation else "cp.async.bulk"
        action = f".{operation}" if operation else ""
        k(f"{name}.global.shared::cta.bulk_group{action} [{start}], [{base}], {size};",
          "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;")
    return k.text()


def staged_store_ptx() -> str:
    """Parameters: target, source. Four 128-byte stages through two shared slots, each reused after wait_group.read."""
    k = Kernel("u64", "u64", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    target, source = k.pointer(0), k.pointer(1)
    offset = k.b32(f"shl.b32 $, {tid}, 2;")
    for stage in range(4):
        if stage >= 2:
            with k.thread(tid):
                k("cp.async.bulk.wait_group.read 1;")
            k("bar.sync 0;")
        address = k.element(source, offset, 1)
        value = k.b32(f"ld.global.b32 $, [{address}+{128 * stage}];")
        slot = k.b32(f"add.u32 $, {base}, {offset};")
        k(f"st.shared.b32 [{slot}+{128 * (stage % 2)}], {value};", "fence.proxy.async.shared::cta;", "bar.sync 0;")
        with k.thread(tid):
            k("cp.async.bulk.global.shared::cta.bulk_group "
              f"[{target}+{128 * stage}], [{base}+{128 * (stage % 2)}], 128;",
              "cp.async.bulk.commit_group;")
    with k.thread(tid):
        k("cp.async.bulk.wait_group 0;")
    return k.text()


def reduce_probe(operation: str, source: bytes, target: bytes) -> Probe:
    """One reduction of all of `source` into `target`, 16 guard bytes on each side."""
    guard = b"\xA5" * 16
    args = (Buffer(guard + target + guard, output=True), Buffer(source), Scalar(len(source)), Scalar(len(source)))
    return Probe(f"bulk/reduce_{operation.replace('.', '_')}", store_ptx(operation), args, shared_bytes=len(source))


def probes() -> list[Probe]:
    """All of this module's probes."""
    out = []
    for space in ("shared::cluster", "shared::cta"):
        for size in (16, 48, 240):
            args = (Buffer(bytes(IMAGE), output=True), Buffer(random_bytes(512, 11)), Scalar(size))
            out.append(Probe(f"bulk/load_{space.replace('::', '_')}_{size}", load_ptx(space), args,
                             shared_bytes=IMAGE + 16))
    for size in (16, 48, 240):
        args = (Buffer(b"\xA5" * 288, output=True), Buffer(random_bytes(256, 12)), Scalar(256), Scalar(size))
        out.append(Probe(f"bulk/store_{size}", store_ptx(), args, shared_bytes=256))
    out.append(Probe("bulk/store_staged", staged_store_ptx(), (Buffer(bytes(512), output=True), Buffer(
        random_bytes(512, 13))), shared_bytes=256))
    for operation, dtype in (("add.f32", "f32"), ("add.noftz.f16", "f16"), ("add.noftz.bf16", "bf16"),
                             ("min.f16", "f16"), ("max.f16", "f16"), ("min.bf16", "bf16"), ("max.bf16", "bf16")):
        out.append(reduce_probe(operation, *float_pairs(dtype, 256)))
    for operation in ("add.u32", "add.s32", "add.u64", "min.s32", "max.u32", "min.s64", "inc.u32", "dec.u32", "and.b32",
                      "or.b32", "xor.b64"):
        source = random_bytes(128, 14)
        target = random_bytes(128, 15)
        if operation.startswith(("inc", "dec")):
            target = source[:32] + (np.frombuffer(source[32:64], np.uint32) + 1).tobytes() + target[64:]
        out.append(reduce_probe(operation, source, target))
    doubles = np.array([1.0, -0.0, 5e-324, 1e308, np.inf, np.nan, 0.1, 2.0**-60] * 2)
    out.append(reduce_probe("add.f64", doubles.tobytes(), np.roll(doubles, 3).tobytes()))
    return out
