"""Calls of device functions, jump tables, the carry flag and module variables, in small kernels of one warp."""

import numpy as np
import pytest

import vgpu
from vgpu.errors import VirtualGpuError
from vgpu.launch import Device, place_globals
from vgpu.ptx import parse

HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"
LANE = np.arange(32, dtype=np.uint32)


def run(body: str, functions: str = "", words: int = 32) -> np.ndarray:
    """uint32[words] that a kernel of one warp leaves in its output: %lane, %out (the lane's word), %r are at hand."""
    text = f"""{HEAD}{functions}
.visible .entry k(.param .u64 p) {{
  .reg .b32 %lane, %r<40>; .reg .b64 %base, %out, %rd<20>; .reg .pred %p<20>;
  mov.u32 %lane, %laneid;
  ld.param.u64 %base, [p];
  mad.wide.u32 %out, %lane, 4, %base;
{body}
  ret;
}}"""
    out = np.full(words, 0xA5A5A5A5, np.uint32)
    vgpu.launch(text, "k", (1, 1, 1), (32, 1, 1), [out])
    return out


# --- calls ---------------------------------------------------------------------------------------------------------

ADD = """.func (.param .b32 sum) add(.param .b32 a, .param .b32 b) {
  .reg .b32 %r<4>;
  ld.param.b32 %r0, [a]; ld.param.b32 %r1, [b];
  add.u32 %r0, %r0, %r1;
  st.param.b32 [sum], %r0;
  ret;
}
"""


def call(function: str, result: str, *arguments: str) -> str:
    """PTX of a call with 32-bit .param variables."""
    names = [f"a{i}" for i in range(len(arguments))]
    lines = ["{", "  .param .b32 back;", *(f"  .param .b32 {n};" for n in names),
             *(f"  st.param.b32 [{n}], {a};" for n, a in zip(names, arguments, strict=True)),
             f"  call.uni (back), {function}, ({', '.join(names)});", f"  ld.param.b32 {result}, [back];", "}"]
    return "\n".join(lines)


def test_call_keeps_the_callers_registers() -> None:
    calls = call("add", "%r2", "%lane", "%r0") + call("add", "%r3", "%r2", "%r1")
    out = run(f"mov.u32 %r0, 100; mov.u32 %r1, 7;\n{calls}\nadd.u32 %r3, %r3, %r0; st.global.u32 [%out], %r3;", ADD)
    assert np.array_equal(out, LANE + 100 + 7 + 100)


def test_functions_call_functions() -> None:
    twice = f""".func (.param .b32 result) twice(.param .b32 x) {{
  .reg .b32 %r<4>;
  ld.param.b32 %r0, [x];
{call('add', '%r1', '%r0', '%r0')}
  st.param.b32 [result], %r1;
  ret;
}}
"""
    out = run(call("twice", "%r0", "%lane") + call("twice", "%r1", "%r0") + "st.global.u32 [%out], %r1;", ADD + twice)
    assert np.array_equal(out, 4 * LANE)


def test_register_parameters_and_loops() -> None:
    power = """.func (.reg .b32 y, .reg .pred even) power(.reg .b32 x, .reg .b32 n) {
  .reg .pred %p; .reg .b32 %i, %odd;
  mov.u32 y, 1; mov.u32 %i, 0;
AGAIN:
  setp.ge.u32 %p, %i, n;
  @%p bra DONE;
  mul.lo.u32 y, y, x;
  add.u32 %i, %i, 1;
  bra AGAIN;
DONE:
  and.b32 %odd, y, 1;
  setp.eq.u32 even, %odd, 0;
  ret;
}
"""
    out = run("and.b32 %r0, %lane, 7; add.u32 %r1, %lane, 2;\n call (%r2, %p1), power, (%r1, %r0);\n"
              "selp.u32 %r3, 0x80000000, 0, %p1; xor.b32 %r2, %r2, %r3; st.global.u32 [%out], %r2;", power)
    want = [(x + 2) ** (x & 7) % 2**32 for x in range(32)]
    assert out.tolist() == [v ^ (1 << 31 if v % 2 == 0 else 0) for v in want]


def test_lanes_return_early_and_calls_are_guarded() -> None:
    sign = """.func (.param .b32 r) sign(.param .b32 x) {
  .reg .b32 %r<2>; .reg .pred %p<3>;
  ld.param.b32 %r0, [x];
  setp.lt.s32 %p0, %r0, 0;
  @%p0 st.param.b32 [r], -1;
  @%p0 ret;
  setp.gt.s32 %p1, %r0, 0;
  @%p1 st.param.b32 [r], 1;
  @%p1 ret;
  st.param.b32 [r], 0;
  ret;
}
"""
    out = run("sub.s32 %r0, %lane, 9; setp.lt.u32 %p5, %lane, 20;\n { .param .b32 x; .param .b32 y;\n"
              " st.param.b32 [x], %r0; st.param.b32 [y], 55;\n @%p5 call (y), sign, (x);\n ld.param.b32 %r1, [y]; }\n"
              "st.global.u32 [%out], %r1;", sign)
    want = np.where(LANE < 20, np.sign(LANE.astype(np.int32) - 9), 55).astype(np.uint32)
    assert np.array_equal(out, want)


def test_local_variables_of_every_call_are_its_own() -> None:
    keep = """.func (.param .b32 r) keep(.param .b32 x) {
  .local .align 4 .b8 depot[8]; .reg .b32 %r<3>; .reg .b64 %rd<2>;
  ld.param.b32 %r0, [x];
  mov.u64 %rd0, depot;
  st.local.u32 [%rd0+4], %r0;
  ld.local.u32 %r1, [%rd0+4];
  st.param.b32 [r], %r1;
  ret;
}
"""
    out = run(call("keep", "%r0", "%lane") + call("keep", "%r1", "7") + "add.u32 %r0, %r0, %r1; "
              "st.global.u32 [%out], %r0;", keep)
    assert np.array_equal(out, LANE + 7)


@pytest.mark.parametrize("functions, body, message", [
    (".func (.param .b32 r) f(.param .b32 x) {\n .reg .b32 %q;\n" + call("f", "%q", "1") + " ret; }\n",
     call("f", "%r0", "1"), "recursive call of f"),
    (ADD, call("add", "%r0", "1"), "1 parameters for 2"),
    (".func f() { .shared .b32 s; ret; }\n", "call f, ();", ".shared variable inside the function f"),
    (".func f() { .reg .b33 %x; ret; }\n", "call f, ();", "registers of type .b33"),
    ("", "call g, ();", "call of g"),
])
def test_what_cannot_be_called_stops(functions: str, body: str, message: str) -> None:
    with pytest.raises(VirtualGpuError, match=message) as caught:
        run(body, functions)
    assert caught.value.kind == "unsupported"


def test_a_function_nobody_calls_may_be_anything() -> None:
    assert np.array_equal(run("st.global.u32 [%out], %lane;", ".func f() { .reg .b33 %x; ret; }\n"), LANE)


# --- jump tables ---------------------------------------------------------------------------------------------------

SWITCH = """
  list: .branchtargets A, B, A, C;
  brx.idx %r0, list;
A:
  add.u32 %r1, %r1, 10;
  bra END;
B:
  add.u32 %r1, %r1, 20;
C:
  add.u32 %r1, %r1, 40;
END:
  bar.warp.sync 0xffffffff;
  st.global.u32 [%out], %r1;
"""


def test_lanes_part_at_a_jump_table_and_meet_again() -> None:
    out = run("and.b32 %r0, %lane, 3; mov.u32 %r1, %lane;" + SWITCH)
    assert np.array_equal(out, LANE + np.array([10, 60, 10, 40], np.uint32)[LANE % 4])


@pytest.mark.parametrize("index, added", [(0, 10), (1, 60), (2, 10), (3, 40)])
def test_jump_table_with_one_index(index: int, added: int) -> None:
    assert np.array_equal(run(f"mov.u32 %r0, {index}; mov.u32 %r1, 0;" + SWITCH), np.full(32, added, np.uint32))


def test_guarded_jump_table() -> None:
    guarded = SWITCH.replace("brx.idx", "@%p0 brx.idx").replace("A:", "  add.u32 %r1, %r1, 1000;\nA:", 1)
    out = run("and.b32 %r0, %lane, 3; mov.u32 %r1, 0; setp.ge.u32 %p0, %lane, 16;" + guarded)
    assert np.array_equal(out, np.where(LANE < 16, 1010, np.array([10, 60, 10, 40])[LANE % 4]))


def test_index_beyond_the_jump_table_stops() -> None:
    with pytest.raises(VirtualGpuError, match="index 4; the list has 4 targets") as caught:
        run("mov.u32 %r0, %lane; mov.u32 %r1, 0;" + SWITCH)
    assert caught.value.kind == "out of bounds" and caught.value.lane == 4


# --- the carry flag ------------------------------------------------------------------------------------------------


def test_carry_chain_of_three_words() -> None:
    """96-bit a + b and a - b; the lane's a and b are products that carry often."""
    words = [(0xFFFFFFFF, 0x80000000), (0xFFFFFFFE, 1), (5, 3)]
    body = "".join(f"mul.lo.u32 %r{i}, %lane, {a}; sub.u32 %r{i + 3}, {b}, %lane;\n" for i, (a, b) in enumerate(words))
    for name, place in (("add", 0), ("sub", 3)):
        body += f"{name}.cc.u32 %r10, %r0, %r3; {name}c.cc.u32 %r11, %r1, %r4; {name}c.u32 %r12, %r2, %r5;\n"
        body += "".join(f"st.global.u32 [%out+{128 * (place + i)}], %r{10 + i};\n" for i in range(3))
    out = run(body, words=192).reshape(2, 3, 32)
    for lane in range(32):
        a, b = (sum(v << 32 * i for i, v in enumerate(side)) for side in
                ([lane * a % 2**32 for a, _ in words], [(b - lane) % 2**32 for _, b in words]))
        for row, want in zip(out[:, :, lane], ((a + b) % 2**96, (a - b) % 2**96), strict=True):
            assert sum(int(v) << 32 * i for i, v in enumerate(row)) == want


def test_carry_that_was_never_set_stops() -> None:
    with pytest.raises(VirtualGpuError) as caught:
        run("addc.u32 %r0, %lane, 1; st.global.u32 [%out], %r0;")
    assert caught.value.kind == "uninitialised"


# --- module variables ----------------------------------------------------------------------------------------------


def test_module_variables_keep_their_values_between_launches() -> None:
    counter = ".global .align 8 .b32 count[2] = {40, 7};\n.const .b16 step = 3;\n"
    body = ("ld.const.u16 %r0, [step]; ld.global.u32 %r1, [count]; add.u32 %r1, %r1, %r0;"
            "st.global.u32 [count], %r1; ld.global.u32 %r2, [count+4]; add.u32 %r1, %r1, %r2;"
            "st.global.u32 [%out], %r1;")
    assert [int(run(body, counter)[0]) for _ in range(3)] == [50, 53, 56]


def test_module_variables_are_known_to_every_device() -> None:
    module = parse(HEAD + ".global .align 16 .b8 fresh[20];\n.const .align 4 .f32 half = 0f3F000000;\n")
    first, second = Device(), Device()
    for device in (first, second, second):
        place_globals(module, device.memory)
    fresh, half = module.variables["fresh"], module.variables["half"]
    assert fresh.address % 16 == 0 and half.address % 4 == 0
    for device in (first, second):
        assert device.memory.view(half.address, 4).view(np.float32)[0] == 0.5
        assert not device.memory.view(fresh.address, 20).any()
        with pytest.raises(VirtualGpuError):
            device.memory.view(fresh.address, 21)
