"""Warp-wide instructions and control flow: elect, shfl, vote, match, redux, named barriers, divergence, early exit."""

from __future__ import annotations

from .assembler import Kernel
from .model import Buffer, Probe, random_bytes

FULL = 0xFFFFFFFF
MASKS = (FULL, 0xFFFF0000, 0x0000FFFF, 0x00000001, 0x80000000, 0x55555555, 0xAAAAAAA0, 0x00F0F000)


class LaneKernel:
    """A kernel whose threads each write words: word j of thread t at out[j * threads + t]."""

    def __init__(self, threads: int = 32, *parameters: str, shared: bool = False):
        self.k = k = Kernel("u64", *parameters, shared=shared)
        self.threads = threads
        self.tid = k.b32("mov.u32 $, %tid.x;")
        self.lane = k.b32("mov.u32 $, %laneid;")
        self.out = k.element(k.pointer(0), self.tid, 4)
        self.count = 0

    def word(self, register: str) -> None:
        """Each active thread records a 32-bit register."""
        self.k(f"st.global.b32 [{self.out}+{4 * self.threads * self.count}], {register};")
        self.count += 1

    def flag(self, predicate: str) -> None:
        """Each active thread records a predicate."""
        self.word(self.k.as_word(predicate))

    def member(self, mask: int) -> str:
        """Predicate: the lane is in the mask."""
        k = self.k
        bit = k.b32(f"shr.u32 $, {mask:#x}, {self.lane};")
        bit = k.b32(f"and.b32 $, {bit}, 1;")
        return k.pred(f"setp.ne.u32 $, {bit}, 0;")

    def probe(self, name: str, *inputs: Buffer, group: str = "warp", shared_bytes: int = 0) -> Probe:
        """The launch of one CTA; words no thread records stay 0xA5A5A5A5."""
        size = 4 * self.threads * self.count
        return Probe(f"{group}/{name}", self.k.text(), (Buffer(b"\xA5" * size, output=True), *inputs),
                     block=(self.threads, 1, 1), shared_bytes=shared_bytes)


def elect() -> Probe:
    """elect.sync for several member masks, executed by the members only: predicate and elected lane."""
    w = LaneKernel()
    for mask in MASKS:
        with w.k.where(w.member(mask)):
            elected, chosen = w.k.new("b32"), w.k.new("pred")
            w.k(f"elect.sync {elected}|{chosen}, {mask:#x};")
            w.word(elected)
            w.flag(chosen)
        w.k("bar.warp.sync 0xffffffff;")
    return w.probe("elect")


def shuffle(mode: str) -> Probe:
    """shfl.sync with uniform and per-lane source operands, every segment width, with and without the predicate."""
    w = LaneKernel()
    k = w.k
    value = k.b32(f"mad.lo.u32 $, {w.lane}, 0x01010101, 0x40;")
    varying = k.b32(f"mul.lo.u32 $, {w.lane}, 7;")
    limits = (0x1F, 0x00, 0x0F, 0x181F, 0x1C03, 0x1800, 0x1E01, 0x1C1F, 0x0807)
    for limit in limits:
        for source in ("0", "1", "3", "8", "17", "31", "33", varying):
            result, valid = k.new("b32"), k.new("pred")
            k(f"shfl.sync.{mode}.b32 {result}|{valid}, {value}, {source}, {limit:#x}, 0xffffffff;")
            packed = k.b32(f"and.b32 $, {result}, 0xffff;")
            k(f"@{valid} or.b32 {packed}, {packed}, 0x10000;")
            w.word(packed)
    clamp = k.b32(f"and.b32 $, {w.lane}, 0x1f;")
    w.word(k.b32(f"shfl.sync.{mode}.b32 $, {value}, 2, {clamp}, 0xffffffff;"))
    with k.where(w.member(0x00FF00FF)):
        segments = 0x1800 if mode == "up" else 0x181F  # of 8 lanes, each wholly inside or outside the mask
        w.word(k.b32(f"shfl.sync.{mode}.b32 $, {value}, 1, {segments:#x}, 0x00ff00ff;"))
    return w.probe(f"shfl_{mode}")


def votes() -> Probe:
    """vote.sync in all four modes, negated predicates, subsets of lanes; activemask in straight-line code."""
    w = LaneKernel()
    k = w.k
    for value in (0, FULL, 1, 0x80000000, 0x12345678):
        p = w.member(value)
        for mode in ("all", "any", "uni"):
            w.flag(k.pred(f"vote.sync.{mode}.pred $, {p}, 0xffffffff;"))
            w.flag(k.pred(f"vote.sync.{mode}.pred $, !{p}, 0xffffffff;"))
        w.word(k.b32(f"vote.sync.ballot.b32 $, {p}, 0xffffffff;"))
        w.word(k.b32(f"vote.sync.ballot.b32 $, !{p}, 0xffffffff;"))
    p = w.member(0x0F0F1234)
    for mask in MASKS[1:]:
        with k.where(w.member(mask)):
            for mode in ("all", "any", "uni"):
                w.flag(k.pred(f"vote.sync.{mode}.pred $, {p}, {mask:#x};"))
            w.word(k.b32(f"vote.sync.ballot.b32 $, {p}, {mask:#x};"))
        k("bar.warp.sync 0xffffffff;")
    w.word(k.b32("activemask.b32 $;"))
    return w.probe("vote")


def matches() -> Probe:
    """match.sync any and all, 32 and 64 bits."""
    w = LaneKernel()
    k = w.k
    constant = k.b32("mov.b32 $, 77;")
    few = k.b32(f"and.b32 $, {w.lane}, 5;")
    for value in (constant, few, w.lane):
        wide = k.b64(f"mul.wide.u32 $, {value}, 0x40000001;")
        w.word(k.b32(f"match.any.sync.b32 $, {value}, 0xffffffff;"))
        w.word(k.b32(f"match.any.sync.b64 $, {wide}, 0xffffffff;"))
        for width, operand in (("b32", value), ("b64", wide)):
            result, same = k.new("b32"), k.new("pred")
            k(f"match.all.sync.{width} {result}|{same}, {operand}, 0xffffffff;")
            w.word(result)
            w.flag(same)
    with k.where(w.member(0x00FF0F00)):
        w.word(k.b32(f"match.any.sync.b32 $, {few}, 0x00ff0f00;"))
    return w.probe("match")


def reductions() -> Probe:
    """redux.sync on uniform and varying operands, whole warp and subsets."""
    w = LaneKernel(32, "u64")
    k = w.k
    value = k.b32(f"ld.global.b32 $, [{k.element(k.pointer(1), w.lane, 4)}];")
    uniform = k.b32("mov.b32 $, 0x87654321;")
    operations = ("add.u32", "add.s32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32")
    for operand in (value, uniform):
        for operation in operations:
            w.word(k.b32(f"redux.sync.{operation} $, {operand}, 0xffffffff;"))
    with k.where(w.member(0x0FF000F1)):
        for operation in operations:
            w.word(k.b32(f"redux.sync.{operation} $, {value}, 0x0ff000f1;"))
    return w.probe("redux", Buffer(random_bytes(128, 41)))


def masks() -> Probe:
    """Special registers of position and lane masks, in a 3-D block."""
    k = Kernel("u64")
    x, y, z = (k.b32(f"mov.u32 $, %tid.{axis};") for axis in "xyz")
    width, height = k.b32("mov.u32 $, %ntid.x;"), k.b32("mov.u32 $, %ntid.y;")
    linear = k.b32(f"mad.lo.u32 $, {z}, {height}, {y};")
    linear = k.b32(f"mad.lo.u32 $, {linear}, {width}, {x};")
    block = k.b32("mov.u32 $, %ctaid.x;")
    linear = k.b32(f"mad.lo.u32 $, {block}, 60, {linear};")
    out = k.element(k.pointer(0), linear, 4)
    registers = ("%laneid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge", "%tid.x",
                 "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%nctaid.x", "%dynamic_smem_size")
    for i, register in enumerate(registers):
        value = k.b32(f"mov.u32 $, {register};")
        k(f"st.global.b32 [{out}+{480 * i}], {value};")
    return Probe("warp/special_registers", k.text(), (Buffer(bytes(480 * len(registers)), output=True),),
                 grid=(2, 1, 1), block=(5, 4, 3), shared_bytes=48)


def nested_branches() -> Probe:
    """Nested conditionals whose arms do different arithmetic, reconverging at the end."""
    w = LaneKernel()
    k = w.k
    x = k.b32(f"mul.lo.u32 $, {w.lane}, 2654435761;")
    for level in range(3):
        other, end = k.label(), k.label()
        bit = k.b32(f"shr.u32 $, {x}, {5 + 7 * level};")
        bit = k.b32(f"and.b32 $, {bit}, 1;")
        p = k.pred(f"setp.eq.u32 $, {bit}, 0;")
        k(f"@{p} bra {other};")
        k(f"mad.lo.u32 {x}, {x}, 3, 1;")
        inner = k.pred(f"setp.lt.u32 $, {w.lane}, {11 + 5 * level};")
        with k.where(inner):
            k(f"xor.b32 {x}, {x}, 0x5a5a;")
            small = k.pred(f"setp.gt.s32 $, {x}, 0;")
            k(f"@{small} add.u32 {x}, {x}, 17;", f"@!{small} sub.u32 {x}, {x}, 17;")
        k(f"bra {end};")
        k.lines.append(f"{other}:")
        k(f"shf.l.wrap.b32 {x}, {x}, {x}, 5;")
        k.lines.append(f"{end}:")
        k("bar.warp.sync 0xffffffff;")
        w.word(k.b32(f"shfl.sync.bfly.b32 $, {x}, 1, 0x1f, 0xffffffff;"))
    w.word(x)
    return w.probe("nested", group="control")


def lane_loops() -> Probe:
    """Loops of lane-dependent length: counted, with break and continue, Collatz steps, a loop in a loop."""
    w = LaneKernel()
    k = w.k
    x, i = k.b32("mov.b32 $, 1;"), k.b32("mov.b32 $, 0;")
    trips = k.b32(f"rem.u32 $, {w.lane}, 7;")
    top, end = k.label(), k.label()
    k.lines.append(f"{top}:")
    k(f"@{k.pred(f'setp.ge.u32 $, {i}, {trips};')} bra {end};", f"mad.lo.u32 {x}, {x}, 3, {i};",
      f"add.u32 {i}, {i}, 1;", f"bra {top};")
    k.lines.append(f"{end}:")
    w.word(x)
    steps, n = k.b32("mov.b32 $, 0;"), k.b32(f"add.u32 $, {w.lane}, 1;")
    top, end, even, again = (k.label() for _ in range(4))
    k.lines.append(f"{top}:")
    k(f"@{k.pred(f'setp.eq.u32 $, {n}, 1;')} bra {end};", f"add.u32 {steps}, {steps}, 1;")
    bit = k.b32(f"and.b32 $, {n}, 1;")
    k(f"@{k.pred(f'setp.eq.u32 $, {bit}, 0;')} bra {even};", f"mad.lo.u32 {n}, {n}, 3, 1;", f"bra {again};")
    k.lines.append(f"{even}:")
    k(f"shr.u32 {n}, {n}, 1;")
    k.lines.append(f"{again}:")
    k(f"@{k.pred(f'setp.lt.u32 $, {steps}, 100;')} bra {top};")
    k.lines.append(f"{end}:")
    w.word(steps)
    total, outer = k.b32("mov.b32 $, 0;"), k.b32(f"and.b32 $, {w.lane}, 3;")
    inner = k.new("b32")
    first, second, skip, leave = (k.label() for _ in range(4))
    k.lines.append(f"{first}:")
    k(f"mov.b32 {inner}, {w.lane};")
    k.lines.append(f"{second}:")
    k(f"sub.s32 {inner}, {inner}, 3;", f"@{k.pred(f'setp.lt.s32 $, {inner}, 0;')} bra {skip};",
      f"mad.lo.u32 {total}, {total}, 7, {inner};", f"@{k.pred(f'setp.gt.u32 $, {total}, 100000;')} bra {leave};",
      f"bra {second};")
    k.lines.append(f"{skip}:")
    k(f"sub.s32 {outer}, {outer}, 1;", f"@{k.pred(f'setp.ge.s32 $, {outer}, 0;')} bra {first};")
    k.lines.append(f"{leave}:")
    w.word(total)
    return w.probe("loops", group="control")


def early_return() -> Probe:
    """Lanes leave one after another, by branch and by predicated ret; those left go on voting and shuffling."""
    w = LaneKernel()
    k = w.k
    with k.where(k.pred(f"setp.ge.u32 $, {w.lane}, 24;")):
        w.word(w.lane)
        k("ret;")
    odd = k.b32(f"and.b32 $, {w.lane}, 1;")
    p = k.pred(f"setp.eq.u32 $, {odd}, 1;")
    w.word(k.b32(f"vote.sync.ballot.b32 $, {p}, 0x00ffffff;"))
    gone = k.pred(f"setp.lt.u32 $, {w.lane}, 4;")
    k(f"@{gone} ret;")
    w.word(k.b32(f"shfl.sync.bfly.b32 $, {w.lane}, 1, 0x1f, 0x00fffff0;"))
    w.word(k.b32(f"redux.sync.add.u32 $, {w.lane}, 0x00fffff0;"))
    k(f"@{p} exit;")
    w.word(k.b32(f"vote.sync.ballot.b32 $, {gone}, 0x00555550;"))
    return w.probe("early_return", group="control")


def predication() -> Probe:
    """Predicated arithmetic, loads and stores; predicate logic; setp with two results and a combining predicate."""
    w = LaneKernel(32, "u64")
    k = w.k
    source = k.element(k.pointer(1), w.lane, 4)
    a = k.b32(f"ld.global.b32 $, [{source}];")
    b = k.b32(f"ld.global.b32 $, [{source}+128];")
    p, q = k.new("pred"), k.new("pred")
    k(f"setp.lt.s32 {p}|{q}, {a}, {b};")
    w.flag(p)
    w.flag(q)
    for combine in ("and", "or", "xor"):
        for negate in ("", "!"):
            r, s = k.new("pred"), k.new("pred")
            k(f"setp.gt.{combine}.u32 {r}|{s}, {a}, {b}, {negate}{p};")
            w.flag(r)
            w.flag(s)
    r = k.pred(f"setp.hi.u32 $, {a}, 0x40000000;")
    for line in (f"and.pred $, {p}, {r};", f"or.pred $, {p}, {r};", f"xor.pred $, {p}, {r};", f"not.pred $, {r};",
                 f"mov.pred $, {r};"):
        w.flag(k.pred(line))
    x = k.b32(f"mov.b32 $, {a};")
    k(f"@{p} add.u32 {x}, {x}, {b};", f"@!{r} mul.lo.u32 {x}, {x}, 5;", f"@{r} ld.global.b32 {x}, [{source}+128];")
    w.word(x)
    k(f"@{q} st.global.b32 [{w.out}+{4 * w.threads * w.count}], {b};")
    w.count += 1
    w.word(k.b32(f"selp.b32 $, {a}, {b}, {p};"))
    return w.probe("predication", Buffer(random_bytes(256, 42)), group="control")


def switch() -> Probe:
    """An indexed branch taken differently by the lanes, one target falling through into the next."""
    w = LaneKernel()
    k = w.k
    x = k.b32(f"add.u32 $, {w.lane}, 100;")
    index = k.b32(f"rem.u32 $, {w.lane}, 4;")
    end = k.label()
    cases = [k.label() for _ in range(4)]
    k(f"targets: .branchtargets {', '.join(cases)};", f"brx.idx {index}, targets;")
    for i, case in enumerate(cases):
        k.lines.append(f"{case}:")
        k(f"mad.lo.u32 {x}, {x}, {2 * i + 3}, {i};")
        if i != 1:
            k(f"bra {end};")
    k.lines.append(f"{end}:")
    w.word(x)
    return w.probe("switch", group="control")


def function_call() -> Probe:
    """A function with parameters and a result, called by some lanes only."""
    w = LaneKernel()
    k = w.k
    k.functions.append(
        ".func (.param .b32 result) scale(.param .b32 x, .param .b64 y)\n{\n  .reg .b32 %r<4>;\n  .reg .b64 %rd<2>;\n"
        "  .reg .pred %p<1>;\n  ld.param.b32 %r0, [x];\n  ld.param.b64 %rd0, [y];\n  cvt.u32.u64 %r1, %rd0;\n"
        "  setp.lt.u32 %p0, %r0, 8;\n  mov.b32 %r2, 7;\n  @%p0 bra DONE;\n  mad.lo.u32 %r2, %r0, %r1, 5;\nDONE:\n"
        "  st.param.b32 [result], %r2;\n  ret;\n}\n")
    x = k.b32("mov.b32 $, 0;")
    factor = k.b64("mov.b64 $, 1000;")
    with k.where(w.member(0x0FFF0FFF)):
        k("{", ".param .b32 first;", ".param .b64 second;", ".param .b32 back;", f"st.param.b32 [first], {w.lane};",
          f"st.param.b64 [second], {factor};", "call.uni (back), scale, (first, second);", f"ld.param.b32 {x}, [back];",
          "}")
    w.word(x)
    return w.probe("call", group="control")


def exchange(w: LaneKernel, base: str, value: str, barrier: str) -> str:
    """Store to the own cell, cross a barrier, load the mirrored thread's cell."""
    k = w.k
    cell = k.b32(f"mad.lo.u32 $, {w.tid}, 4, {base};")
    k(f"st.shared.b32 [{cell}], {value};", barrier)
    return cell


def block_barriers() -> Probe:
    """bar.sync, barrier.sync and bar.red over a whole CTA, and over two halves with names and counts."""
    w = LaneKernel(128, shared=True)
    k = w.k
    base = k.b32("mov.u32 $, smem;")
    cell = exchange(w, base, w.tid, "bar.sync 0;")
    mirror = k.b32(f"xor.b32 $, {w.tid}, 127;")
    mirror = k.b32(f"mad.lo.u32 $, {mirror}, 4, {base};")
    seen = k.b32(f"ld.shared.b32 $, [{mirror}];")
    w.word(seen)
    k("barrier.sync 3, 128;")
    third = k.b32(f"rem.u32 $, {w.tid}, 3;")
    p = k.pred(f"setp.eq.u32 $, {third}, 0;")
    w.word(k.b32(f"bar.red.popc.u32 $, 1, {p};"))
    w.word(k.b32(f"bar.red.popc.u32 $, 1, 128, !{p};"))
    for mode in ("and", "or"):
        w.flag(k.pred(f"bar.red.{mode}.pred $, 2, {p};"))
    half = k.b32(f"shr.u32 $, {w.tid}, 6;")
    name = k.b32(f"add.u32 $, {half}, 4;")
    k(f"st.shared.b32 [{cell}+512], {seen};", f"bar.sync {name}, 64;")
    near = k.b32(f"xor.b32 $, {w.tid}, 63;")
    near = k.b32(f"mad.lo.u32 $, {near}, 4, {base};")
    w.word(k.b32(f"ld.shared.b32 $, [{near}+512];"))
    w.word(k.b32(f"barrier.red.popc.aligned.u32 $, {name}, 64, {p};"))
    return w.probe("block_barriers", group="control", shared_bytes=1024)


def producer_consumer_barriers() -> Probe:
    """Two warps bar.arrive, two warps bar.sync on the same name: full and empty hand-overs in turn."""
    w = LaneKernel(128, shared=True)
    k = w.k
    base = k.b32("mov.u32 $, smem;")
    local = k.b32(f"and.b32 $, {w.tid}, 63;")
    mirror = k.b32(f"xor.b32 $, {local}, 45;")
    own = k.b32(f"mad.lo.u32 $, {local}, 4, {base};")
    other = k.b32(f"mad.lo.u32 $, {mirror}, 4, {base};")
    producer = k.pred(f"setp.lt.u32 $, {w.tid}, 64;")
    total, value = k.b32("mov.b32 $, 0;"), k.b32(f"add.u32 $, {w.tid}, 1;")
    for step in range(3):
        with k.where(producer):
            if step:
                k("bar.sync 2, 128;")
            k(f"st.shared.b32 [{own}], {value};", "bar.arrive 1, 128;", f"mad.lo.u32 {value}, {value}, 3, {step};")
        with k.where(k.pred(f"setp.ge.u32 $, {w.tid}, 64;")):
            k("bar.sync 1, 128;")
            seen = k.b32(f"ld.shared.b32 $, [{other}];")
            k(f"mad.lo.u32 {total}, {total}, 11, {seen};")
            if step < 2:
                k("bar.arrive 2, 128;")
    w.word(total)
    w.word(value)
    return w.probe("producer_consumer", group="control", shared_bytes=256)


def exited_warp() -> Probe:
    """One warp of four leaves before the others cross bar.sync without a count."""
    w = LaneKernel(128, shared=True)
    k = w.k
    base = k.b32("mov.u32 $, smem;")
    k(f"@{k.pred(f'setp.ge.u32 $, {w.tid}, 96;')} exit;")
    cell = exchange(w, base, w.tid, "bar.sync 0;")
    other = k.b32(f"add.u32 $, {w.tid}, 32;")
    other = k.b32(f"rem.u32 $, {other}, 96;")
    other = k.b32(f"mad.lo.u32 $, {other}, 4, {base};")
    w.word(k.b32(f"ld.shared.b32 $, [{other}];"))
    k("bar.sync 0;", f"st.shared.b32 [{cell}], 0;")
    return w.probe("exited_warp", group="control", shared_bytes=512)


def partial_warp() -> Probe:
    """A block of 40 threads: votes and reductions of the last, partly filled warp."""
    w = LaneKernel(40)
    k = w.k
    mask = k.b32("activemask.b32 $;")
    w.word(mask)
    w.word(k.b32(f"redux.sync.add.u32 $, {w.tid}, {mask};"))
    even = k.b32(f"and.b32 $, {w.tid}, 1;")
    w.word(k.b32(f"vote.sync.ballot.b32 $, {k.pred(f'setp.eq.u32 $, {even}, 0;')}, {mask};"))
    w.word(k.b32(f"bar.red.popc.u32 $, 0, {k.pred(f'setp.ge.u32 $, {w.tid}, 30;')};"))
    return w.probe("partial_warp", group="control")


def probes() -> list[Probe]:
    """All of this module's probes."""
    return [elect(), *(shuffle(mode) for mode in ("up", "down", "bfly", "idx")), votes(), matches(), reductions(),
            masks(), nested_branches(), lane_loops(), early_return(), predication(), switch(), function_call(),
            block_barriers(), producer_consumer_barriers(), exited_warp(), partial_warp()]
