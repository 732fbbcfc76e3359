"""What stops a kernel: misaligned accesses, bad sizes, missing CTAs, trap. Each probe records what happens."""

from __future__ import annotations

from .assembler import Kernel
from .model import Buffer, Probe, Scalar, random_bytes


def access(name: str, *lines: str, cluster: int = 1, block: int = 32) -> Probe:
    """A kernel that runs `lines`; {g}: a global address, {s}: a shared address, {v}, {w}: 32- and 64-bit
    registers with a value; {t}, {x}, {y}: 32-bit registers without."""
    k = Kernel("u64", "u64", shared=True)
    out, base = k.pointer(0), k.b32("mov.u32 $, smem;")
    k.fill_shared(base, "256", "0x01020304")
    k("bar.sync 0;")
    value, wide = k.b32("mov.b32 $, 5;"), k.b64("mov.b64 $, 7;")
    names = {"g": k.pointer(1), "s": base, "v": value, "w": wide, "t": k.new("b32"), "x": k.new("b32"),
             "y": k.new("b32")}
    for line in lines:
        k(line.format(**names))
    k(f"st.global.b32 [{out}], {value};")
    shape = (cluster, 1, 1)
    args = (Buffer(b"\xA5" * 16, output=True), Buffer(random_bytes(256, 61), output=True))
    return Probe(f"stops/{name}", k.text(), args, grid=shape, cluster=shape, block=(block, 1, 1), shared_bytes=256,
                 may_stop=True)


def bulk(name: str, size: int, source: int = 0, target: int = 0) -> Probe:
    """A bulk load of `size` bytes from offset `source` of a buffer to shared offset `target`, by one thread."""
    k = Kernel("u64", "u64", "u32", "u32", "u32", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    out = k.pointer(0)
    start = k.element(k.pointer(1), k.scalar(3), 1)
    size_register = k.scalar(2)
    there = k.b32(f"add.u32 $, {base}, {k.scalar(4)};")
    k.fill_shared(base, "256", "0x01020304")
    with k.thread(tid):
        k.barrier_init(f"{base}+256", 1)
    k("fence.proxy.async;", "bar.sync 0;")
    with k.thread(tid):
        k(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{base}+256], {size_register};",
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
          f"[{there}], [{start}], {size_register}, [{base}+256];")
    barrier = k.b32(f"add.u32 $, {base}, 256;")
    k.wait(barrier, 0)
    k.shared_to_global(out, base, "256")
    args = (Buffer(b"\xA5" * 256, output=True), Buffer(random_bytes(256, 62)), Scalar(size), Scalar(source),
            Scalar(target))
    return Probe(f"stops/{name}", k.text(), args, shared_bytes=272, may_stop=True)


def probes() -> list[Probe]:
    """All of this module's probes."""
    return [
        access("trap", "trap;"),
        access("load_global_misaligned", "ld.global.b32 {v}, [{g}+2];"),
        access("load_global_vector_misaligned", "ld.global.v4.b32 {{{v}, {t}, {x}, {y}}}, [{g}+8];",
               "xor.b32 {v}, {v}, {t};", "xor.b32 {v}, {v}, {x};", "xor.b32 {v}, {v}, {y};"),
        access("store_global_misaligned", "st.global.b64 [{g}+4], {w};"),
        access("load_shared_misaligned", "ld.shared.b32 {v}, [{s}+1];"),
        access("store_shared_vector_misaligned", "st.shared.v2.b64 [{s}+8], {{{w}, {w}}};"),
        access("atomic_misaligned", "atom.global.add.u32 {v}, [{g}+2], 1;"),
        access("mbarrier_misaligned", "mbarrier.init.shared::cta.b64 [{s}+4], 1;", block=1),
        access("load_shared_far_outside", "ld.shared.b32 {v}, [{s}+1048576];"),
        access("store_global_null", "mov.b64 {w}, 0;", "st.global.b32 [{w}], {v};"),
        access("map_to_missing_cta", "mapa.shared::cluster.u32 {t}, {s}, 5;", "ld.shared::cluster.b32 {v}, [{t}];",
               "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;", cluster=2),
        access("ldmatrix_misaligned", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{{v}}}, [{s}+8];"),
        bulk("bulk_size_8", 8), bulk("bulk_size_24", 24), bulk("bulk_source_at_8", 32, source=8),
        bulk("bulk_target_at_8", 32, target=8), bulk("bulk_target_at_16", 32, target=16),
    ]
