"""Deadlock reports: for every warp, what it waits for and who has arrived there before."""

from __future__ import annotations

SHOWN = 2  # clusters


def _place(instr, word: str = "at") -> str:
    return f" {word} PTX line {instr.line}: {instr.text.split(chr(10))[0].strip()[:80]}" if instr else ""


def next_statement(warp):
    """The first statement of the block where the warp goes on, or None."""
    program = warp.program
    if warp.pc >= len(program.blocks):
        return None
    first = program.blocks[warp.pc].__code__.co_firstlineno
    return next((i for i in program.line_items[first:] if i is not None), None)


def waiting_for(warp) -> str:
    """One line on a warp that cannot go on."""
    if warp.waiting is None:
        return f"polls without success{_place(next_statement(warp), 'near')}"
    kind, *rest = warp.waiting
    place = _place(warp.waiting_at)
    if kind == "mbarrier":
        bar, parity, cta = rest
        sources = ", ".join(f"{who} x{n}" for who, n in bar.sources.items()) or "nobody"
        return (f"waits for parity {parity} of the mbarrier at shared offset {bar.offset:#x} of CTA {cta.id}: "
                f"{bar.describe()}; arrivals so far: {sources}{place}")
    if kind == "named barrier":
        (bar,) = rest
        return f"waits at barrier {bar.number}: {bar.describe()}{place}"
    if kind == "cluster barrier":
        (bar,) = rest
        return f"waits at the cluster barrier: {bar.describe()}{place}"
    return f"waits for {kind}{place}"


def deadlock_report(clusters) -> str:
    """Text for the whole grid; the first clusters only, the rest counted."""
    lines = ["no warp can go on and nothing is in flight"]
    clusters = list(clusters)
    for cluster in clusters[:SHOWN]:
        for cta in cluster.ctas:
            for warp in cta.warps:
                if warp.waiting is not None or warp in cluster.ready:
                    lines.append(f"  CTA {cta.id} warp {warp.index} {waiting_for(warp)}")
    if len(clusters) > SHOWN:
        lines.append(f"  … and {len(clusters) - SHOWN} more clusters")
    return "\n".join(lines)
