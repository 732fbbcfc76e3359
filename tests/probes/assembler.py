"""Composes the PTX text of a probe kernel, instruction by instruction.

Emitting a line that contains `$` allocates a register for it, so `k.b32(f"add.u32 $, {a}, 4;")` emits
`add.u32 %r5, %r4, 4;` and returns `"%r5"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
PREFIX = {"pred": "%p", "b16": "%rs", "b32": "%r", "b64": "%rd"}
PARAMETERS = {"u32": ".param .u32 {}", "u64": ".param .u64 {}", "map": ".param .align 64 .b8 {}[128]"}


class Kernel:
    """A kernel named `probe` with parameters p0, p1, … of the given kinds ("u32", "u64", "map").

    With `shared`, it has one dynamic shared array `smem`, aligned to 1024 bytes.
    """

    def __init__(self, *parameters: str, shared: bool = False):
        self.parameters = parameters
        self.shared = shared
        self.lines: list[str] = []
        self.functions: list[str] = []
        self.counts = dict.fromkeys(PREFIX, 0)
        self.labels = 0

    def new(self, kind: str) -> str:
        """A fresh register of `kind` ("pred", "b16", "b32", "b64")."""
        self.counts[kind] += 1
        return f"{PREFIX[kind]}{self.counts[kind] - 1}"

    def label(self) -> str:
        """A fresh label."""
        self.labels += 1
        return f"L{self.labels}"

    def __call__(self, *lines: str) -> None:
        self.lines.extend("  " + line for line in lines)

    def _result(self, kind: str, line: str) -> str:
        register = self.new(kind)
        self(line.replace("$", register))
        return register

    def pred(self, line: str) -> str:
        """Emit `line`, its `$` a new predicate, and return that."""
        return self._result("pred", line)

    def b16(self, line: str) -> str:
        """Emit `line`, its `$` a new 16-bit register, and return that."""
        return self._result("b16", line)

    def b32(self, line: str) -> str:
        """Emit `line`, its `$` a new 32-bit register, and return that."""
        return self._result("b32", line)

    def b64(self, line: str) -> str:
        """Emit `line`, its `$` a new 64-bit register, and return that."""
        return self._result("b64", line)

    def pointer(self, index: int) -> str:
        """Parameter `index` as a global address."""
        generic = self.b64(f"ld.param.u64 $, [p{index}];")
        return self.b64(f"cvta.to.global.u64 $, {generic};")

    def scalar(self, index: int) -> str:
        """Parameter `index`, 32 bits."""
        return self.b32(f"ld.param.u32 $, [p{index}];")

    def map_address(self, index: int) -> str:
        """The generic address of the tensor map that is parameter `index`."""
        address = self.b64(f"mov.b64 $, p{index};")
        return self.b64(f"cvta.param.u64 $, {address};")

    def element(self, pointer: str, index: str, size: int) -> str:
        """pointer + index * size, a 64-bit address; index is an unsigned 32-bit register."""
        offset = self.b64(f"mul.wide.u32 $, {index}, {size};")
        return self.b64(f"add.s64 $, {pointer}, {offset};")

    def as_word(self, predicate: str) -> str:
        """The predicate as 1 or 0."""
        return self.b32(f"selp.b32 $, 1, 0, {predicate};")

    @contextmanager
    def where(self, predicate: str) -> Iterator[None]:
        """Only lanes where `predicate` holds run the body."""
        end = self.label()
        self(f"@!{predicate} bra {end};")
        yield
        self.lines.append(f"{end}:")

    @contextmanager
    def thread(self, tid: str, number: int = 0) -> Iterator[None]:
        """Only the thread whose `tid` is `number` runs the body."""
        with self.where(self.pred(f"setp.eq.u32 $, {tid}, {number};")):
            yield

    @contextmanager
    def words(self, count: str) -> Iterator[str]:
        """Byte offsets 4 * (tid + i * ntid) below `count` (register or number): the loop's offset register."""
        offset = self.b32("mov.u32 $, %tid.x;")
        self(f"shl.b32 {offset}, {offset}, 2;")
        step = self.b32("mov.u32 $, %ntid.x;")
        self(f"shl.b32 {step}, {step}, 2;")
        top, end = self.label(), self.label()
        self.lines.append(f"{top}:")
        done = self.pred(f"setp.ge.u32 $, {offset}, {count};")
        self(f"@{done} bra {end};")
        yield offset
        self(f"add.u32 {offset}, {offset}, {step};", f"bra {top};")
        self.lines.append(f"{end}:")

    def fill_shared(self, base: str, count: str, word: str) -> None:
        """Store `word` to shared [base, base + count)."""
        value = self.b32(f"mov.b32 $, {word};")
        with self.words(count) as offset:
            address = self.b32(f"add.u32 $, {base}, {offset};")
            self(f"st.shared.b32 [{address}], {value};")

    def global_to_shared(self, base: str, pointer: str, count: str) -> None:
        """Copy `count` bytes of global memory to shared with ordinary loads and stores."""
        with self.words(count) as offset:
            source = self.element(pointer, offset, 1)
            value = self.b32(f"ld.global.b32 $, [{source}];")
            address = self.b32(f"add.u32 $, {base}, {offset};")
            self(f"st.shared.b32 [{address}], {value};")

    def shared_to_global(self, pointer: str, base: str, count: str) -> None:
        """Copy `count` bytes of shared memory to global with ordinary loads and stores."""
        with self.words(count) as offset:
            address = self.b32(f"add.u32 $, {base}, {offset};")
            value = self.b32(f"ld.shared.b32 $, [{address}];")
            target = self.element(pointer, offset, 1)
            self(f"st.global.b32 [{target}], {value};")

    def barrier_init(self, address: str, count: int | str) -> None:
        """Initialise an mbarrier and make it visible to the cluster and the asynchronous proxy."""
        self(f"mbarrier.init.shared::cta.b64 [{address}], {count};", "fence.mbarrier_init.release.cluster;")

    def wait(self, address: str, parity: int | str, scope: str = "") -> None:
        """Spin until the phase of `parity` of the mbarrier at shared `address` is complete."""
        top, end = self.label(), self.label()
        self.lines.append(f"{top}:")
        done = self.pred(f"mbarrier.try_wait.parity{scope}.shared::cta.b64 $, [{address}], {parity};")
        self(f"@{done} bra {end};", f"bra {top};")
        self.lines.append(f"{end}:")

    def cluster_sync(self) -> None:
        """All threads of the cluster."""
        self("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;")

    def text(self) -> str:
        """The whole PTX module."""
        declared = ",\n  ".join(PARAMETERS[kind].format(f"p{i}") for i, kind in enumerate(self.parameters))
        out = HEADER + "".join(self.functions)
        if self.shared:
            out += ".extern .shared .align 1024 .b8 smem[];\n"
        out += f".visible .entry probe(\n  {declared})\n{{\n"
        for kind, count in self.counts.items():
            if count:
                out += f"  .reg .{kind} {PREFIX[kind]}<{count}>;\n"
        return out + "\n".join(self.lines) + "\n  ret;\n}\n"


class Recorder:
    """Writes 32-bit results one after another to global memory at `pointer`, from one thread."""

    def __init__(self, kernel: Kernel, pointer: str):
        self.kernel = kernel
        self.pointer = pointer
        self.count = 0

    def word(self, register: str) -> None:
        """Record a 32-bit register."""
        self.kernel(f"st.global.b32 [{self.pointer}+{4 * self.count}], {register};")
        self.count += 1

    def flag(self, predicate: str) -> None:
        """Record a predicate as 1 or 0."""
        self.word(self.kernel.as_word(predicate))
