"""Mutants of a kernel's PTX: each synchronisation removed in turn.

A virtual GPU is trusted as far as it notices what is wrong. `mutants` takes out every barrier wait, arrival, commit,
fence and wait of a kernel, one at a time; whoever runs them sees which removal stops the virtual GPU, spoils the
result, or passes unnoticed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_REMOVED = re.compile(
    r"(?:bar|barrier)\.(?:cta\.)?(?:sync|arrive)|barrier\.cluster\.|fence\.|membar\.|mbarrier\.(?:arrive|expect_tx|init)"
    r"|tcgen05\.(?:commit|wait|fence|alloc|dealloc|relinquish_alloc_permit)|cp\.async\.bulk\.(?:commit|wait)_group"
    r"|wgmma\.(?:fence|commit_group|wait_group)"
    r"|griddepcontrol\.")
_WAIT = re.compile(r"mbarrier\.(?:try|test)_wait\S*\s+([%\w]+)\s*,")


@dataclass(frozen=True)
class Mutant:
    """A kernel's PTX with one statement taken out. line: of that statement; what: the statement."""

    line: int
    what: str
    text: str


def mutants(text: str) -> list[Mutant]:
    """One mutant for every synchronising statement of the PTX `text`. A wait is replaced by one that always passes."""
    lines = text.split("\n")
    out = []
    for i, line in enumerate(lines):
        code = line.split("//")[0]
        for statement in re.finditer(r"[^;{}]+;", code):
            body = re.sub(r"^\s*(?:[\w$]+:\s*)?(?:@!?[\w%$]+\s+)?", "", statement.group())
            wait = _WAIT.match(body)
            if wait:
                new = statement.group().replace(body, f"mov.pred {wait.group(1)}, -1;")
            elif _REMOVED.match(body):
                new = statement.group().replace(body, "")
            else:
                continue
            if new.strip().startswith("@"):
                new = ""
            changed = line[:statement.start()] + new + line[statement.end():]
            out.append(Mutant(i + 1, body.strip().rstrip(";").replace("\t", " "),
                              "\n".join([*lines[:i], changed, *lines[i + 1:]])))
    return out
