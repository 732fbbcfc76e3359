"""Loads and stores of every width, atomics, address spaces, local memory, ldmatrix and stmatrix, cp.async."""

from __future__ import annotations

from .assembler import Kernel
from .model import Buffer, Probe, random_bytes
from .tma import float_pairs
from .warps import LaneKernel

SOURCE = Buffer(random_bytes(1024, 51))


def narrow_loads() -> Probe:
    """8- and 16-bit loads with zero and sign extension to 16, 32 and 64 bits, from global and shared memory."""
    w = LaneKernel(32, "u64", shared=True)
    k = w.k
    source = k.pointer(1)
    base = k.b32("mov.u32 $, smem;")
    k.global_to_shared(base, source, "256")
    k("bar.sync 0;")
    here = k.element(source, w.lane, 2)
    there = k.b32(f"mad.lo.u32 $, {w.lane}, 2, {base};")
    for space, address in (("global", here), ("shared", there)):
        for kind in ("u8", "s8", "b8", "u16", "s16", "b16"):
            w.word(k.b32(f"ld.{space}.{kind} $, [{address}];"))
        for kind in ("u8", "s8"):
            short = k.b16(f"ld.{space}.{kind} $, [{address}+1];")
            w.word(k.b32(f"cvt.u32.u16 $, {short};"))
        for kind in ("s8", "s16", "u16"):
            wide = k.b64(f"ld.{space}.{kind} $, [{address}];")
            w.word(k.b32(f"cvt.u32.u64 $, {wide};"))
            wide = k.b64(f"shr.u64 $, {wide}, 32;")
            w.word(k.b32(f"cvt.u32.u64 $, {wide};"))
    return w.probe("narrow_loads", SOURCE, group="memory", shared_bytes=256)


def narrow_stores() -> Probe:
    """8- and 16-bit stores, also through predicates and immediate offsets, to global and shared memory."""
    w = LaneKernel(32, "u64", shared=True)
    k = w.k
    target = k.pointer(1)
    base = k.b32("mov.u32 $, smem;")
    k.fill_shared(base, "256", "0x5a5a5a5a")
    k("bar.sync 0;")
    value = k.b32(f"mad.lo.u32 $, {w.lane}, 0x01030507, 0x90a0b0c0;")
    short = k.b16(f"cvt.u16.u32 $, {value};")
    odd = k.b32(f"and.b32 $, {w.lane}, 1;")
    p = k.pred(f"setp.eq.u32 $, {odd}, 1;")
    there = k.b32(f"mad.lo.u32 $, {w.lane}, 4, {base};")
    for space, address in (("global", k.element(target, w.lane, 4)), ("shared", there)):
        k(f"st.{space}.b8 [{address}+1], {short};", f"st.{space}.b8 [{address}+3], {value};",
          f"@{p} st.{space}.b16 [{address}+130], {short};")
    k("bar.sync 0;")
    for i in (0, 128):
        w.word(k.b32(f"ld.shared.b32 $, [{there}+{i}];"))
    args = (Buffer(b"\xA5" * 256, output=True),)
    return w.probe("narrow_stores", *args, group="memory", shared_bytes=256)


def vectors() -> Probe:
    """Vector loads and stores, 2 and 4 elements of 8 to 64 bits, global and shared; .nc and cache modifiers."""
    w = LaneKernel(32, "u64", "u64", shared=True)
    k = w.k
    source, target = k.pointer(1), k.pointer(2)
    base = k.b32("mov.u32 $, smem;")
    k.global_to_shared(base, source, "512")
    k("bar.sync 0;")
    here, there = k.element(source, w.lane, 16), k.b32(f"mad.lo.u32 $, {w.lane}, 16, {base};")
    place = k.element(target, w.lane, 16)
    forms = [("v4", "b32", 4), ("v2", "b32", 2), ("v2", "b64", 2), ("v4", "b16", 4), ("v2", "b16", 2), ("v4", "b8", 4),
             ("v2", "u8", 2)]
    register = {"b8": "b16", "u8": "b16", "b16": "b16", "b32": "b32", "b64": "b64"}
    slot = 0
    for space, address in (("global", here), ("global.nc", here), ("shared", there)):
        for vector, kind, count in forms:
            values = [k.new(register[kind]) for _ in range(count)]
            k(f"ld.{space}.{vector}.{kind} {{{', '.join(values)}}}, [{address}];",
              f"st.global.{vector}.{kind} [{place}+{512 * slot}], {{{', '.join(reversed(values))}}};")
            slot += 1
    values = [k.new("b32") for _ in range(4)]
    listed = f"{{{', '.join(values)}}}"
    k(f"ld.global.L1::no_allocate.v4.b32 {listed}, [{here}];", "bar.sync 0;", f"st.shared.v4.b32 [{there}], {listed};",
      f"st.shared.v2.b32 [{there}+8], {{{values[0]}, {values[1]}}};", "bar.sync 0;")
    again = [k.new("b64") for _ in range(2)]
    k(f"ld.shared.v2.b64 {{{', '.join(again)}}}, [{there}];",
      f"st.global.v2.b64 [{place}+{512 * slot}], {{{', '.join(again)}}};")
    slot += 1
    w.word(values[3])
    return w.probe("vectors", SOURCE, Buffer(b"\xA5" * 512 * slot, output=True), group="memory", shared_bytes=512)


def access_modes() -> Probe:
    """Volatile, relaxed, acquire, release and cached accesses; fences; a generic address for each space."""
    w = LaneKernel(32, "u64", "u64", shared=True)
    k = w.k
    source, target = k.pointer(1), k.pointer(2)
    here, place = k.element(source, w.lane, 4), k.element(target, w.lane, 4)
    loads = ("ld.volatile.global", "ld.relaxed.gpu.global", "ld.acquire.gpu.global", "ld.acquire.sys.global",
             "ld.global.ca", "ld.global.cg", "ld.global.cs", "ld.global.lu", "ld.global.cv", "ld.weak.global",
             "ld.global.nc.L1::evict_last", "ldu.global")
    for i, form in enumerate(loads):
        w.word(k.b32(f"{form}.b32 $, [{here}+{4 * i}];"))
    value = k.b32(f"mul.lo.u32 $, {w.lane}, 3;")
    stores = ("st.volatile.global", "st.relaxed.gpu.global", "st.release.gpu.global", "st.global.wb", "st.global.cg",
              "st.global.cs", "st.global.wt", "st.weak.global", "st.relaxed.sys.global.L1::no_allocate")
    for i, form in enumerate(stores):
        k(f"{form}.b32 [{place}+{128 * i}], {value};", f"add.u32 {value}, {value}, 1;")
    k("fence.acq_rel.gpu;", "membar.gl;", "fence.sc.cta;", "membar.cta;", "fence.acq_rel.cluster;")
    return w.probe("access_modes", SOURCE, Buffer(b"\xA5" * 128 * len(stores), output=True), group="memory",
                   shared_bytes=64)


def generic_addresses() -> Probe:
    """cvta in both directions, isspacep, generic loads and stores of shared, local and global memory, local arrays."""
    w = LaneKernel(32, "u64", "u64", shared=True)
    k = w.k
    k(".local .align 16 .b8 depot[64];")
    global_generic = k.b64("ld.param.u64 $, [p1];")
    global_address = k.b64(f"cvta.to.global.u64 $, {global_generic};")
    k.pointer(2)
    shared_generic = k.b64("cvta.shared.u64 $, smem;")
    local_address = k.b64("mov.u64 $, depot;")
    local_generic = k.b64(f"cvta.local.u64 $, {local_address};")
    for address in (global_generic, shared_generic, local_generic):
        for space in ("global", "shared", "local", "const"):
            w.flag(k.pred(f"isspacep.{space} $, {address};"))
    w.flag(k.pred(f"setp.eq.s64 $, {global_generic}, {global_address};"))
    offset = k.b32("mov.u32 $, smem;")
    back = k.b64(f"cvta.to.shared.u64 $, {shared_generic};")
    narrow = k.b32(f"cvt.u32.u64 $, {back};")
    w.flag(k.pred(f"setp.eq.u32 $, {narrow}, {offset};"))
    value = k.b32(f"ld.b32 $, [{k.element(global_generic, w.lane, 4)}];")
    w.word(value)
    cell = k.element(shared_generic, w.lane, 4)
    k(f"st.b32 [{cell}], {value};", "bar.warp.sync 0xffffffff;")
    other = k.b32(f"xor.b32 $, {w.lane}, 9;")
    place = k.b32(f"mad.lo.u32 $, {other}, 4, {offset};")
    w.word(k.b32(f"ld.shared.b32 $, [{place}];"))
    for i in range(16):
        entry = k.b32(f"mad.lo.u32 $, {value}, {2 * i + 1}, {i};")
        k(f"st.local.b32 [{local_address}+{4 * i}], {entry};")
    index = k.b32(f"and.b32 $, {value}, 15;")
    w.word(k.b32(f"ld.local.b32 $, [{k.element(local_address, index, 4)}];"))
    k(f"st.b16 [{local_generic}+6], {k.b16('mov.b16 $, 0x1234;')};")
    parts = [k.new("b32") for _ in range(4)]
    k(f"ld.local.v4.b32 {{{', '.join(parts)}}}, [{local_address}];")
    w.word(k.b32(f"xor.b32 $, {parts[1]}, {parts[3]};"))
    byte = k.element(local_generic, w.lane, 1)
    w.word(k.b32(f"ld.s8 $, [{byte}+7];"))
    return w.probe("generic_addresses", SOURCE, SOURCE, group="memory", shared_bytes=128)


def constants() -> Probe:
    """Initialised module-scope constant and global arrays, indexed by lane; static shared memory."""
    w = LaneKernel(32)
    k = w.k
    k.functions.append(".const .align 4 .b32 table[8] = {3, 1, 4, 1, 5, 9, 0x80000000, -1};\n"
                       ".global .align 4 .b8 bytes[12] = {1, 2, 3, 4, 250, 251, 252, 253};\n"
                       ".shared .align 16 .b8 scratch[128];\n")
    index = k.b32(f"and.b32 $, {w.lane}, 7;")
    address = k.b64("mov.u64 $, table;")
    w.word(k.b32(f"ld.const.b32 $, [{k.element(address, index, 4)}];"))
    w.word(k.b32("ld.const.b32 $, [table+20];"))
    address = k.b64("mov.u64 $, bytes;")
    w.word(k.b32(f"ld.global.s8 $, [{k.element(address, index, 1)}];"))
    w.word(k.b32("ld.global.b32 $, [bytes+8];"))
    scratch = k.b32("mov.u32 $, scratch;")
    cell = k.b32(f"mad.lo.u32 $, {w.lane}, 4, {scratch};")
    k(f"st.shared.b32 [{cell}], {index};", "bar.sync 0;")
    w.word(k.b32("ld.shared.b32 $, [scratch+24];"))
    return w.probe("constants", group="memory")


def atomics(space: str) -> Probe:
    """atom on one word a lane (result and memory), then red by all lanes on common words."""
    w = LaneKernel(32, "u64", "u64", shared=True)
    k = w.k
    memory, source = k.pointer(1), k.pointer(2)
    base = k.b32("mov.u32 $, smem;")
    size = 4096
    operations = ("add.u32", "add.s32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32", "dec.u32",
                  "exch.b32", "add.f32", "cas.b32", "add.noftz.f16x2", "add.noftz.bf16x2")
    k.global_to_shared(base, memory, str(size))
    k("bar.sync 0;")
    value = k.b32(f"ld.global.b32 $, [{k.element(source, w.lane, 4)}];")
    if space == "shared":
        own, common = k.b32(f"mad.lo.u32 $, {w.lane}, 4, {base};"), base
    else:
        own, common = k.element(memory, w.lane, 4), memory
    for i, operation in enumerate(operations):
        extra = f", {w.lane}" if operation.startswith("cas") else ""
        w.word(k.b32(f"atom.{space}.{operation} $, [{own}+{128 * i}], {value}{extra};"))
    wide = k.b64(f"mul.wide.u32 $, {value}, 0x89abcdef;")
    double = k.b32(f"shl.b32 $, {w.lane}, 3;")
    pair = k.b32(f"add.u32 $, {base}, {double};") if space == "shared" else k.element(memory, double, 1)
    for i, operation in enumerate(("add.u64", "max.s64", "exch.b64", "cas.b64")):
        extra = f", {wide}" if operation.startswith("cas") else ""
        old = k.b64(f"atom.{space}.{operation} $, [{pair}+{1792 + 256 * i}], {wide}{extra};")
        w.word(k.b32(f"cvt.u32.u64 $, {old};"))
    for i, operation in enumerate(("add.u32", "max.s32", "min.u32", "and.b32", "or.b32", "xor.b32")):
        k(f"red.{space}.{operation} [{common}+{3840 + 4 * i}], {value};")
    one = k.b32("mov.b32 $, 0f3F800000;")
    zero = k.b32("mov.b32 $, 0;")
    k(f"st.{space}.b32 [{common}+3968], {zero};", "bar.sync 0;", f"red.{space}.add.f32 [{common}+3968], {one};",
      "bar.sync 0;")
    if space == "shared":
        k.shared_to_global(memory, base, str(size))
    return w.probe(f"atomics_{space}", Buffer(random_bytes(size, 52), output=True), SOURCE, group="memory",
                   shared_bytes=size)


def float_atomics(space: str) -> Probe:
    """atom.add and red.add of f32, f16x2 and bf16x2 on signed zeros, subnormals, infinities, NaNs and ties."""
    k = Kernel("u64", "u64", "u64", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    out, memory, source = k.pointer(0), k.pointer(1), k.pointer(2)
    k.global_to_shared(base, memory, "4096")
    k("bar.sync 0;")
    operand = k.element(source, tid, 4)
    own = k.b32(f"mad.lo.u32 $, {tid}, 4, {base};") if space == "shared" else k.element(memory, tid, 4)
    result = k.element(out, tid, 4)
    operations = ("add.f32", "add.f32", "add.noftz.f16x2", "add.noftz.bf16x2")
    for i, operation in enumerate(operations):
        value = k.b32(f"ld.global.b32 $, [{operand}+{1024 * i}];")
        if i == 1:
            k(f"red.{space}.{operation} [{own}+{1024 * i}], {value};")
            continue
        old = k.b32(f"atom.{space}.{operation} $, [{own}+{1024 * i}], {value};")
        k(f"st.global.b32 [{result}+{1024 * i}], {old};")
    if space == "shared":
        k("bar.sync 0;")
        k.shared_to_global(memory, base, "4096")
    kinds = (("f32", 256), ("f32", 256), ("f16", 512), ("bf16", 512))
    a, b = zip(*(float_pairs(dtype, count) for dtype, count in kinds), strict=True)
    args = (Buffer(bytes(4096), output=True), Buffer(b"".join(a), output=True), Buffer(b"".join(b)))
    return Probe(f"memory/float_atomics_{space}", k.text(), args, block=(256, 1, 1), shared_bytes=4096)


def scoped_atomics() -> Probe:
    """Atomics with semantics and scopes, and vector reductions (sm_90)."""
    w = LaneKernel(32, "u64", "u64")
    k = w.k
    memory, source = k.pointer(1), k.pointer(2)
    value = k.b32(f"ld.global.b32 $, [{k.element(source, w.lane, 4)}];")
    own = k.element(memory, w.lane, 16)
    for i, form in enumerate(("atom.relaxed.gpu.global.add.u32", "atom.acq_rel.gpu.global.exch.b32",
                              "atom.release.sys.global.or.b32", "atom.acquire.cta.global.max.u32")):
        w.word(k.b32(f"{form} $, [{own}+{4 * i}], {value};"))
    k(f"red.release.gpu.global.add.u32 [{own}+4], {w.lane};")
    small = k.b32("mov.b32 $, 0f40400000;")
    k(f"red.global.add.v4.f32 [{own}+512], {{{small}, {value}, {small}, {value}}};",
      f"red.global.add.v2.f32 [{own}+1024], {{{value}, {small}}};")
    halves = [k.b16(f"mov.b16 $, {x};") for x in ("0x3c00", "0x0001", "0x7bff", "0xc000")]
    k(f"red.global.add.noftz.v4.f16 [{own}+1536], {{{', '.join(halves)}}};")
    return w.probe("scoped_atomics", Buffer(random_bytes(2048, 53), output=True), SOURCE, group="memory")


def load_matrix() -> Probe:
    """ldmatrix of 1, 2 and 4 matrices, plain and transposed, rows at scattered 16-byte addresses."""
    w = LaneKernel(32, "u64", shared=True)
    k = w.k
    base = k.b32("mov.u32 $, smem;")
    k.global_to_shared(base, k.pointer(1), "1024")
    k("bar.sync 0;")
    row = k.b32(f"mad.lo.u32 $, {w.lane}, 11, 5;")
    row = k.b32(f"and.b32 $, {row}, 63;")
    address = k.b32(f"mad.lo.u32 $, {row}, 16, {base};")
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            registers = [k.new("b32") for _ in range(count)]
            k(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{', '.join(registers)}}}, [{address}];")
            for register in registers:
                w.word(register)
    return w.probe("ldmatrix", SOURCE, group="memory", shared_bytes=1024)


def store_matrix() -> Probe:
    """stmatrix of 1, 2 and 4 matrices, plain and transposed."""
    w = LaneKernel(32, "u64", "u64", shared=True)
    k = w.k
    target, source = k.pointer(1), k.pointer(2)
    base = k.b32("mov.u32 $, smem;")
    k.fill_shared(base, "3072", "0x5a5a5a5a")
    k("bar.sync 0;")
    row = k.b32(f"mul.lo.u32 $, {w.lane}, 13;")
    row = k.b32(f"and.b32 $, {row}, 31;")
    address = k.b32(f"mad.lo.u32 $, {row}, 16, {base};")
    values = [k.b32(f"ld.global.b32 $, [{k.element(source, w.lane, 4)}+{128 * i}];") for i in range(4)]
    slot = 0
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            k(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [{address}+{512 * slot}], "
              f"{{{', '.join(values[:count])}}};")
            slot += 1
    k("bar.sync 0;")
    k.shared_to_global(target, base, "3072")
    w.word(row)
    return w.probe("stmatrix", Buffer(bytes(3072), output=True), SOURCE, group="memory", shared_bytes=3072)


def move_matrix() -> Probe:
    """movmatrix: an 8 x 8 transpose across the warp's registers."""
    w = LaneKernel(32, "u64")
    k = w.k
    value = k.b32(f"ld.global.b32 $, [{k.element(k.pointer(1), w.lane, 4)}];")
    w.word(k.b32(f"movmatrix.sync.aligned.m8n8.trans.b16 $, {value};"))
    return w.probe("movmatrix", SOURCE, group="memory")


def byte_transpose() -> Probe:
    """A 4 x 4 byte transpose by prmt, and bytes of shared memory written by other lanes."""
    w = LaneKernel(32, "u64", shared=True)
    k = w.k
    source = k.element(k.pointer(1), w.lane, 16)
    rows = [k.new("b32") for _ in range(4)]
    k(f"ld.global.v4.b32 {{{', '.join(rows)}}}, [{source}];")
    low = [k.b32(f"prmt.b32 $, {rows[i]}, {rows[i + 1]}, 0x5140;") for i in (0, 2)]
    high = [k.b32(f"prmt.b32 $, {rows[i]}, {rows[i + 1]}, 0x7362;") for i in (0, 2)]
    for first, second in (low, high):
        for selector in (0x5410, 0x7632):
            w.word(k.b32(f"prmt.b32 $, {first}, {second}, {selector:#x};"))
    base = k.b32("mov.u32 $, smem;")
    cell = k.b32(f"mad.lo.u32 $, {w.lane}, 4, {base};")
    k(f"st.shared.b32 [{cell}], {rows[0]};", "bar.sync 0;")
    scattered = k.b32(f"mad.lo.u32 $, {w.lane}, 37, 3;")
    scattered = k.b32(f"and.b32 $, {scattered}, 127;")
    byte = k.b32(f"add.u32 $, {base}, {scattered};")
    w.word(k.b32(f"ld.shared.u8 $, [{byte}];"))
    return w.probe("byte_transpose", SOURCE, group="memory", shared_bytes=128)


def copy_async(wait: str) -> Probe:
    """Non-bulk cp.async of 4, 8 and 16 bytes, sources shorter or ignored, finished by groups or an mbarrier."""
    w = LaneKernel(32, "u64", "u64", shared=True)
    k = w.k
    target, source = k.pointer(1), k.pointer(2)
    base = k.b32("mov.u32 $, smem;")
    k.fill_shared(base, "1536", "0x5a5a5a5a")
    barrier = k.b32(f"add.u32 $, {base}, 1536;")
    with k.thread(w.lane):
        k(f"mbarrier.init.shared::cta.b64 [{barrier}], 32;")
    k("bar.sync 0;")
    here = k.element(source, w.lane, 16)
    there = k.b32(f"mad.lo.u32 $, {w.lane}, 16, {base};")
    short = k.b32(f"rem.u32 $, {w.lane}, 17;")
    few = k.b32(f"rem.u32 $, {w.lane}, 5;")
    odd = k.b32(f"and.b32 $, {w.lane}, 1;")
    ignored = k.pred(f"setp.eq.u32 $, {odd}, 1;")
    k(f"cp.async.cg.shared.global [{there}], [{here}], 16, {short};", "cp.async.commit_group;",
      f"cp.async.ca.shared.global [{there}+512], [{here}], 4, {few};",
      f"cp.async.ca.shared.global [{there}+520], [{here}+8], 8;", "cp.async.commit_group;",
      f"cp.async.ca.shared.global [{there}+1024], [{here}], 16, {ignored};")
    if wait == "mbarrier":
        k(f"cp.async.mbarrier.arrive.noinc.shared.b64 [{barrier}];")
        k.wait(barrier, 0)
    else:
        k("cp.async.commit_group;", "cp.async.wait_group 1;")
        w.word(k.b32(f"ld.shared.b32 $, [{there}+512];"))
        k("cp.async.wait_all;")
    k("bar.sync 0;")
    k.shared_to_global(target, base, "1536")
    w.word(short)
    return w.probe(f"cp_async_{wait}", Buffer(bytes(1536), output=True), SOURCE, group="memory", shared_bytes=1552)


def clock_and_prefetch() -> Probe:
    """Instructions without a visible result: prefetch, nanosleep, griddepcontrol, clocks that never run backwards."""
    k = Kernel("u64", "u64")
    out, source = k.pointer(0), k.pointer(1)
    generic = k.b64("ld.param.u64 $, [p1];")
    before = k.b64("mov.u64 $, %clock64;")
    timer = k.b64("mov.u64 $, %globaltimer;")
    k("griddepcontrol.wait;", "griddepcontrol.launch_dependents;",
      f"prefetch.global.L2 [{source}];", f"prefetch.L1 [{generic}];", "nanosleep.u32 20;",
      f"cp.async.bulk.prefetch.L2.global [{source}], 64;")
    after = k.b64("mov.u64 $, %clock64;")
    later = k.b64("mov.u64 $, %globaltimer;")
    for i, (first, second) in enumerate(((before, after), (timer, later))):
        word = k.as_word(k.pred(f"setp.le.u64 $, {first}, {second};"))
        k(f"st.global.b32 [{out}+{4 * i}], {word};")
    return Probe("memory/prefetch_and_clock", k.text(), (Buffer(bytes(16), output=True), SOURCE))


def cache_policies() -> Probe:
    """The values of createpolicy, and a load, a store and a reduction that use one."""
    w = LaneKernel(32, "u64", "u64")
    k = w.k
    source, target = k.element(k.pointer(1), w.lane, 4), k.element(k.pointer(2), w.lane, 4)
    forms = ("fractional.L2::evict_first.b64 $, 1.0", "fractional.L2::evict_last.b64 $, 0.5",
             "fractional.L2::evict_normal.b64 $", "fractional.L2::evict_last.L2::evict_unchanged.b64 $, 0.25")
    for form in forms:
        policy = k.b64(f"createpolicy.{form};")
        low, high = k.new("b32"), k.new("b32")
        k(f"mov.b64 {{{low}, {high}}}, {policy};")
        w.word(low)
        w.word(high)
    value = k.b32(f"ld.global.L2::cache_hint.b32 $, [{source}], {policy};")
    k(f"st.global.L2::cache_hint.b32 [{target}], {value}, {policy};",
      f"red.global.add.L2::cache_hint.u32 [{target}], {w.lane}, {policy};")
    return w.probe("cache_policies", SOURCE, Buffer(bytes(128), output=True), group="memory")


def probes() -> list[Probe]:
    """All of this module's probes."""
    return [narrow_loads(), narrow_stores(), vectors(), access_modes(), generic_addresses(), constants(),
            atomics("global"), atomics("shared"), float_atomics("global"), float_atomics("shared"), scoped_atomics(),
            load_matrix(), store_matrix(), move_matrix(), byte_transpose(), copy_async("groups"),
            copy_async("mbarrier"), clock_and_prefetch(), cache_policies()]
