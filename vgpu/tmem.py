"""Tensor memory of a CTA: 128 lanes x 512 columns x 32 bits (PTX ISA 9.7.16.1); address = lane << 16 | column."""

from __future__ import annotations

import numpy as np

LANES, COLUMNS = 128, 512
POISON = 0x7FBAD0AD  # a signalling-like NaN pattern as float32, two NaN scales as e4m3 bytes would not be noticed alone


class TensorMemory:
    """cells: uint32[128, 512] poisoned; written: bool[128, 512]; owner: int16[512], id of the allocation or -1."""

    def __init__(self):
        self.cells = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.written = np.zeros((LANES, COLUMNS), np.bool_)
        self.owner = np.full(COLUMNS, -1, np.int16)
