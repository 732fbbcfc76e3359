"""The PTX parser: every construct of the grammar that compilers emit, and errors that name the line."""

import struct

import pytest

import vgpu
from vgpu.ptx import CallParam, Imm, Mem, Not, Pair, Reg, Special, Sym, Vec, parse, parse_number, split_commas

HEAD = ".version 8.7\n.target sm_100a, texmode_independent\n.address_size 64\n"


def kernel(body: str, params: str = "", directives: str = "", module: str = ""):
    """The parsed kernel `k`."""
    return parse(f"{HEAD}{module}\n.visible .entry k({params}) {directives}\n{{\n{body}\n}}\n").kernels["k"]


def one(statement: str, declare: str = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;"):
    """A single statement, parsed."""
    (found,) = kernel(f"{declare}\n{statement}").body
    return found


def fails(text: str, line: int, match: str = "") -> vgpu.VirtualGpuError:
    """Parse text that must be refused at a line."""
    with pytest.raises(vgpu.VirtualGpuError, match=match) as caught:
        parse(text)
    assert caught.value.line == line, str(caught.value)
    assert f"PTX line {line}" in str(caught.value)
    return caught.value


# --- modules ---------------------------------------------------------------------------------------


def test_module_header_and_several_kernels():
    module = parse(f"{HEAD}.entry first() {{ ret; }}\n.visible .entry second() {{ ret; }}\n.weak .entry third()\n"
                   "{ ret; }")
    assert (module.version, module.target) == ("8.7", "sm_100a")
    assert list(module.kernels) == ["first", "second", "third"]


def test_nul_at_the_end_and_empty_lines():
    module = parse(f"\n\n{HEAD}.entry k() {{ ret; }}\n\n\0\0")
    assert [i.opcode for i in module.kernels["k"].body] == [("ret",)]


def test_debug_sections_files_and_pragmas_are_skipped():
    text = (f'{HEAD}.file 1 "a//b.cu"\n.pragma "nounroll";\n.entry k() {{\n.loc 1 5 7, function_name $L1, '
            'inlined_at 1 2 3\n'
            '.pragma "used_bytes_mask 0xf; //";\nret; }\n.section .debug_str { .b8 97, 98; }\n.alias f, g;\n')
    assert [i.line for i in parse(text).kernels["k"].body] == [9]


def test_comments_keep_line_numbers():
    k = kernel("// one\n/* two\nthree */ ret; // four\n/**/ exit;")
    assert [(i.opcode[0], i.line) for i in k.body] == [("ret", 9), ("exit", 10)]


def test_a_comment_separates_words():
    assert one("mov.u32/* */%r1, %r2;").opcode == ("mov", "u32")


# --- parameters and variables ----------------------------------------------------------------------


def test_parameters_get_the_offsets_of_a_c_struct():
    params = """.param .u32 a, .param .u64 .ptr .global .align 16 b, .param .u8 c, .param .align 64 .b8 map[128],
        .param .u16 d, .param .f32 e, .param .u64 .ptr f, .param .align 4 .b8 g[6]"""
    found = kernel("ret;", params).params
    assert [(p.name, p.offset, p.size) for p in found] == [
        ("a", 0, 4), ("b", 8, 8), ("c", 16, 1), ("map", 64, 128), ("d", 192, 2), ("e", 196, 4), ("f", 200, 8),
        ("g", 208, 6)]


def test_entry_directives():
    k = kernel("ret;", directives=".reqntid 192, 1, 1\n.minnctapersm 1 .explicitcluster\n.reqnctapercluster 2")
    assert k.directives == {"reqntid": (192, 1, 1), "minnctapersm": (1,), "explicitcluster": (),
                            "reqnctapercluster": (2,)}


@pytest.mark.parametrize("text, size, align, data", [
    (".global .align 4 .b8 v[6] = {1, 2, 0xff, -1}", 6, 4, bytes([1, 2, 255, 255])),
    (".visible .global .u32 v = 7", 4, 4, struct.pack("<I", 7)),
    (".const .align 8 .b16 v[] = {1, 2, 3}", 6, 8, struct.pack("<3H", 1, 2, 3)),
    (".global .f32 v[2] = {1.5, 0f40000000}", 8, 4, struct.pack("<2f", 1.5, 2.0)),
    (".global .f64 v[2] = {1.5, 0d4000000000000000}", 16, 8, struct.pack("<2d", 1.5, 2.0)),
    (".global .b32 v[2][3] = {{1, 2, 3}, {4, 5, 6}}", 24, 4, struct.pack("<6I", 1, 2, 3, 4, 5, 6)),
    (".global .align 16 .b8 v[16]", 16, 16, b""),
])
def test_module_variables(text, size, align, data):
    v = parse(f"{HEAD}{text};\n.entry k() {{ ret; }}").variables["v"]
    assert (v.size, v.align, v.init) == (size, align, data)
    assert v.space in ("global", "const")


def test_extern_shared_has_no_size_of_its_own():
    module = parse(f"{HEAD}.extern .shared .align 1024 .b8 smem[];\n.shared .align 8 .b64 bar[3];\n"
                   ".entry k() { ret; }")
    smem, bar = module.variables["smem"], module.variables["bar"]
    assert (smem.extern, smem.size, smem.align, smem.space) == (True, 0, 1024, "shared")
    assert (bar.extern, bar.size, bar.align) == (False, 24, 8)


def test_local_and_shared_variables_of_a_kernel():
    k = kernel(".local .align 8 .b8 __local_depot0[40];\n.shared .f32 x;\nret;")
    assert (k.locals["__local_depot0"].size, k.locals["__local_depot0"].align) == (40, 8)
    assert k.shared["x"].size == 4


# --- operands --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [
    ("0", Imm(0)), ("-7", Imm(-7)), ("0x1F", Imm(31)), ("-0x10", Imm(-16)), ("0b101", Imm(5)), ("017", Imm(15)),
    ("0x8000000000000000U", Imm(1 << 63)), ("12U", Imm(12)), ("0f3F800000", Imm(0x3F800000, 32)),
    ("0F3f800000", Imm(0x3F800000, 32)), ("0d3FF0000000000000", Imm(0x3FF0000000000000, 64)),
    ("1.5", Imm(0x3FF8000000000000, 64)), ("-2.5e1", Imm(0xC039000000000000, 64)), ("1e3", Imm(0x408F400000000000, 64)),
])
def test_literals(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "x1", "0x", "0f3F80", "09", "1.2.3", "--1", "%r1"])
def test_what_is_not_a_literal(text):
    assert parse_number(text) is None


def test_registers_of_every_width():
    declare = """.reg .pred %p<3>; .reg .b16 %rs<2>; .reg .f32 %f1, x; .reg .b64 %rd<4>; .reg .b128 %q<2>;
        .reg .b32 t2<3>;
        .reg .s8 c;"""
    i = one("foo %p2, %rs1, %f1, x, %rd3, %q1, t22, c;", declare)
    assert [(r.name, r.width) for r in i.operands] == [
        ("%p2", 1), ("%rs1", 16), ("%f1", 32), ("x", 32), ("%rd3", 64), ("%q1", 128), ("t22", 32), ("c", 8)]


def test_a_register_beyond_the_declared_range_is_not_one():
    assert one("foo %r8;").operands == [Reg("%r8", 32)]
    assert one("foo %r9;").operands == [Special("%r9")]


def test_vectors_pairs_sinks_and_negation():
    i = one("foo {%r1, _, 3, %rd1}, %r1|%p1, _|%p2, !%p3, (%r1, %r2), _;")
    assert i.operands == [
        Vec((Reg("%r1", 32), Sym("_"), Imm(3), Reg("%rd1", 64))), Pair(Reg("%r1", 32), Reg("%p1", 1)),
        Pair(Sym("_"), Reg("%p2", 1)), Not(Reg("%p3", 1)), Vec((Reg("%r1", 32), Reg("%r2", 32))), Sym("_")]


@pytest.mark.parametrize("text, base, offset", [
    ("[%rd1]", Reg("%rd1", 64), 0), ("[%rd1+16]", Reg("%rd1", 64), 16), ("[ %rd1 + 0x10 ]", Reg("%rd1", 64), 16),
    ("[%rd1+-8]", Reg("%rd1", 64), -8), ("[%rd1-8]", Reg("%rd1", 64), -8), ("[name]", Sym("name"), 0),
    ("[name+4]", Sym("name"), 4), ("[240]", Imm(240), 0),
])
def test_addresses(text, base, offset):
    assert one(f"foo {text};").operands == [Mem(base, offset)]


def test_tensor_coordinates():
    (found,) = one("foo [%rd1, {%r1, %r2, 0}];").operands
    assert found == Mem(Reg("%rd1", 64), 0, (Vec((Reg("%r1", 32), Reg("%r2", 32), Imm(0))),))


def test_symbols_with_an_offset_special_registers_and_constants():
    i = one("foo name, name+8, name + -4, %tid.x, %cluster_ctarank, WARP_SZ;")
    assert i.operands == [Sym("name"), Sym("name", 8), Sym("name", -4), Special("%tid.x"), Special("%cluster_ctarank"),
                          Imm(32)]


def test_guards():
    assert one("@%p1 ret;").guard == (Reg("%p1", 1), False)
    assert one("@!%p1 ret;").guard == (Reg("%p1", 1), True)
    assert one("@ ! %p1\n ret;").guard == (Reg("%p1", 1), True)
    assert one("ret;").guard is None


def test_opcodes_keep_double_colons_and_any_white_space_ends_them():
    i = one("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes\n\t[%r1], "
            "[%rd1, {%r2, %r3}], [%r4];")
    assert i.opcode == ("cp", "async", "bulk", "tensor", "2d", "shared::cluster", "global",
                        "mbarrier::complete_tx::bytes")
    assert [type(o) for o in i.operands] == [Mem, Mem, Mem]


def test_split_commas_respects_brackets():
    assert split_commas("a, {b, c}, [d, {e, f}], (g)") == ["a", "{b, c}", "[d, {e, f}]", "(g)"]
    assert split_commas("") == []


# --- scopes, labels, tables ------------------------------------------------------------------------


def test_scopes_with_the_same_register_and_label_names():
    k = kernel("""
        .reg .b32 r; .reg .pred p;
        { .reg .b32 r; .reg .pred p; L: mov.b32 r, 1; @p bra L; bra END; }
        { .reg .b64 r; L: mov.b64 r, 2; bra L; { L: bra L; } }
        L: mov.b32 r, 3; bra L;
        END: ret;""")
    moves = [i.operands[0] for i in k.body if i.opcode[0] == "mov"]
    assert len({m.name for m in moves}) == 3 and [m.width for m in moves] == [32, 64, 32]
    targets = [i.operands[0].name for i in k.body if i.opcode[0] == "bra"]
    assert [k.labels[t] for t in targets] == [0, k.labels["END"], 3, 5, 6]
    assert k.labels["END"] == 8
    assert k.body[1].guard[0] != Reg("p", 1) and k.body[1].guard[0].width == 1


def test_an_inner_scope_sees_the_outer_registers():
    k = kernel(".reg .b32 outer; { mov.b32 outer, 1; }")
    assert k.body[0].operands[0] == Reg("outer", 32)


def test_shared_and_local_variables_of_scopes_do_not_meet():
    k = kernel("{ .shared .b32 v; st.shared.b32 [v], 1; } { .shared .b64 v; st.shared.b64 [v], 1; }")
    names = [i.operands[0].base.name for i in k.body]
    assert len(set(names)) == 2
    assert [k.shared[n].size for n in names] == [4, 8]


def test_labels_at_the_end_and_several_at_one_place():
    k = kernel("A: B: ret; C:")
    assert k.labels == {"A": 0, "B": 0, "C": 1}


def test_branch_targets_and_brx():
    k = kernel("""
        .reg .b32 %r<2>;
        table: .branchtargets L0, L1,
            L2;
        brx.idx %r1, table;
        L0: ret; L1: ret; L2: ret;""")
    assert k.tables == {"table": ["L0", "L1", "L2"]}
    assert k.body[0].operands == [Reg("%r1", 32), Sym("table")]


def test_call_parameters_are_not_kernel_parameters():
    k = kernel("""
        .reg .b64 %rd<2>; .reg .b32 %r<2>;
        { .param .b64 k_param_0; .param .align 8 .b8 p1[16]; .param .b32 retval0;
        st.param.b64 [k_param_0], %rd1; st.param.b64 [p1+8], %rd1;
        call.uni (retval0), vprintf, (k_param_0, p1);
        ld.param.b32 %r1, [retval0]; }
        ld.param.u64 %rd1, [k_param_0];""", ".param .u64 k_param_0")
    assert isinstance(k.body[0].operands[0].base, CallParam)
    assert k.body[1].operands[0].offset == 8
    assert k.body[2].operands[1] == Sym("vprintf")
    assert all(isinstance(p, CallParam) for p in k.body[2].operands[0].items + k.body[2].operands[2].items)
    assert k.body[4].operands[1].base == Sym("k_param_0")


# --- errors ----------------------------------------------------------------------------------------


def test_unknown_statements_of_a_module():
    fails(f"{HEAD}.entry k() {{ ret; }}\n\nfoo bar;\n", 6, "module-level")
    fails(f"{HEAD}.global .b32 x = {{1, y}};\n", 4, "initialiser")
    fails(f"{HEAD}.global .foo x;\n", 4, "declaration")
    fails(f"{HEAD}.entry k(.param .foo x) {{ ret; }}\n", 4, "declaration")
    fails(f"{HEAD}\n.global .b32 x\n", 5, "without ';'")
    fails(f"{HEAD}\n\n.entry k()\n", 6, "without '{'")


@pytest.mark.parametrize("body, line, match", [
    ("ret;\n.foo bar;", 6, "directive .foo"),
    (".reg .b7 %r;", 5, "b7"),
    (".reg .b32 %r<x>;", 5, "register name"),
    (".shared .b32 = 4;", 5, "declaration"),
    ("ret;\n\nadd.u32 %r1, 1 + , 2;", 7, "operand not understood"),
    ("@%p1 ret;", 5, "guard %p1 is not a predicate"),
    (".reg .b32 %r1;\n@%r1 ret;", 6, "guard %r1 is not a predicate"),
    ("ld.global.b32 %r1, [%rd1+x];", 5, "offset not understood"),
    ("ld.global.b32 %r1, [%rd1;", 5, "not understood"),
    ("mov.b32 a|b|c, 1;", 5, "not understood"),
    ("mov.b32 %r1, 09;", 5, "not understood"),
    (".branchtargets L;", 5, "without a label"),
    ("L: ret;\nL: ret;", 6, "declared twice"),
    ("ret", 5, "unterminated"),
    (", ;", 5, "not understood"),
])
def test_errors_name_their_line(body, line, match):
    error = fails(f"{HEAD}.entry k() {{\n{body}\n}}", line, match)
    assert error.kind == "unsupported"


def test_a_body_that_never_ends():
    fails(f"{HEAD}.entry k()\n{{\nret;\n", 5, "without a closing brace")


@pytest.mark.parametrize("statement, kind, match", [
    ("frobnicate.b32 %r1, %r2;", "unknown instruction", "frobnicate"),
    ("add.foo.s32 %r1, %r2, %r3;", "unknown instruction", "foo"),
    ("add.s32 %r1, %r2;", "unknown instruction", "operands"),
    ("ld.global.foo.b32 %r1, [%rd1];", "unknown instruction", ".foo"),
    ("ld.global %r1, [%rd1];", "unknown instruction", ".b32"),
    ("ld.global.v3.b32 {%r1, %r2, %r3}, [%rd1];", "unknown instruction", "v3"),
    ("ld.global.v2.b32 {%r1, %r2, %r3}, [%rd1];", "unknown instruction", "vector of 2"),
    ("ld.global.v8.b64 {%rd1,%rd2,%rd3,%rd4,%rd1,%rd2,%rd3,%rd4}, [%rd1];", "unknown instruction", "32 bytes"),
    ("st.global.v2.b32 [%rd1], {%r1};", "unknown instruction", "vector of 2"),
    ("st.const.b32 [%rd1], %r1;", "unknown instruction", "const"),
    ("st.global.v2.b32 [%rd1], {%r1, _};", "unsupported", "_"),
    ("mbarrier.arrive.foo.b64 %rd1, [%r1];", "unknown instruction", "foo"),
    ("mbarrier.test_wait.parity.shared.b64 %p1, [%r1];", "unknown instruction", "operands"),
    ("bar.foo 0;", "unknown instruction", "sync"),
    ("bar.arrive 0;", "unknown instruction", "operands"),
    ("barrier.cluster.arrive.acquire;", "unknown instruction", "acquire"),
    ("fence.proxy.foo;", "unknown instruction", "foo"),
    ("fence.acq_rel;", "unknown instruction", "cta"),
    ("shfl.up.b32 %r1, %r2, 1, 0;", "unknown instruction", "shfl"),
    ("shfl.sync.left.b32 %r1, %r2, 1, 0, -1;", "unknown instruction", "left"),
    ("vote.sync.ballot.pred %r1, %p1, -1;", "unknown instruction", "b32"),
    ("elect.sync %r1, -1;", "unknown instruction", "two destinations"),
    ("redux.sync.and.u32 %r1, %r2, -1;", "unknown instruction", "does not exist"),
    ("redux.sync.add.f32 %r1, %r2, -1;", "unknown instruction", "does not exist"),
    ("redux.sync.min.abs.u32 %r1, %r2, -1;", "unknown instruction", "does not exist"),
    ("atom.global.min.b32 %r1, [%rd1], %r2;", "unknown instruction", "does not exist"),
    ("atom.global.cas.b32 %r1, [%rd1], %r2;", "unknown instruction", "operands"),
    ("atom.global.add.f16 %rs1, [%rd1], %rs2;", "unknown instruction", "noftz"),
    ("atom.global.add.noftz.f32 %r1, [%rd1], %r2;", "unknown instruction", "noftz"),
    ("atom.shared.v2.f32.add {%r1, %r2}, [%r1], {%r3, %r4};", "unknown instruction", "shared"),
    ("red.global.exch.b32 [%rd1], %r1;", "unknown instruction", "does not exist"),
    ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "unknown instruction", "8 bytes"),
    ("cp.async.ca.shared.global [%r1], [%rd1], 12;", "unknown instruction", "12 bytes"),
    ("setmaxnreg.inc.sync.aligned.u32 100;", "unknown instruction", "multiples of 8"),
    ("setmaxnreg.dec.sync.aligned.u32 264;", "unknown instruction", "24 to 256"),
    ("ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r1, %r2, %r3}, [%r4];", "unknown instruction", "x3"),
    ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r4];", "unknown instruction", "1 registers"),
    ("ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1, %r2}, [%r4];", "unknown instruction", "m16n16"),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r1}, [%r4];", "unsupported", "4-bit"),
    ("call (%r1), f, (%r2);", "unsupported", "call of f"),
    ("call.uni (%r1), %rd1, (%r2), proto;", "unsupported", "function pointer"),
    ("bra NOWHERE;", "unsupported", "NOWHERE"),
    ("mov.u32 %r1, %nosuch;", "unsupported", "nosuch"),
    ("mov.u32 %r1, nosuch;", "unsupported", "nosuch"),
    ("cvta.foo.u64 %rd1, %rd2;", "unknown instruction", "foo"),
    ("isspacep %p1, %rd1;", "unknown instruction", "state space"),
    ("frobnicate.sync.aligned;", "unknown instruction", "frobnicate"),
])
def test_unknown_instructions_and_modifiers_stop_at_their_line(statement, kind, match):
    text = f"""{HEAD}.entry k()
{{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
    {statement}
    ret;
}}"""
    with pytest.raises(vgpu.VirtualGpuError, match=match) as caught:
        vgpu.launch(text, "k", (1, 1, 1), (32, 1, 1), [])
    error = caught.value
    assert (error.kind, error.line) == (kind, 7), str(error)
    assert statement.rstrip(";") in str(error) and "PTX line 7" in str(error)


def test_the_kernel_must_exist():
    with pytest.raises(vgpu.VirtualGpuError, match="'other' is not in the module; it has \\['k'\\]"):
        vgpu.launch(f"{HEAD}.entry k() {{ ret; }}", "other", (1, 1, 1), (32, 1, 1), [])
