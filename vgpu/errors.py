"""The one error type of the virtual GPU."""

from __future__ import annotations


class VirtualGpuError(RuntimeError):
    """Something the hardware would get wrong, or that the virtual GPU does not model.

    Units raise it with ``kind``, ``message`` and, where they know it, ``lane``; the warp that
    executes the instruction fills in the place (``line``, ``text``, ``cta``, ``warp``).

    Kinds: ``unknown instruction``, ``unsupported``, ``misaligned``, ``out of bounds``,
    ``uninitialised``, ``race``, ``proxy fence``, ``mbarrier``, ``tensor memory``, ``descriptor``,
    ``tensor map``, ``barrier``, ``deadlock``, ``launch``.
    """

    def __init__(self, kind: str, message: str, *, lane: int | None = None):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.lane = lane
        self.kernel: str | None = None
        self.line: int | None = None
        self.text: str | None = None
        self.cta: tuple[int, int, int] | None = None
        self.warp: int | None = None

    def place(self, *, kernel=None, line=None, text=None, cta=None, warp=None, lane=None) -> VirtualGpuError:
        """Fill in what is not yet known of the place; returns self, to be raised again."""
        for name, value in (("kernel", kernel), ("line", line), ("text", text), ("cta", cta), ("warp", warp),
                            ("lane", lane)):
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

    def __str__(self) -> str:
        out = f"{self.kind}: {self.message}"
        if self.line is not None:
            out += f"\n  at PTX line {self.line}: {(self.text or '').strip()}"
        if self.cta is not None:
            out += f"\n  CTA {self.cta}, warp {self.warp}"
            if self.lane is not None:
                out += f", lane {self.lane}"
        if self.kernel is not None:
            out += f"\n  in kernel {self.kernel[:120]}"
        return out
