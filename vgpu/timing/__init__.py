"""Modelled time of a launch, from the instructions it executed. Every time here is *modelled*, never measured.

`record` keeps what the warps of a launch did; `simulate` replays it against a chip's constants (`chips`); `breakdown`,
`trace` and `plot` explain the result.
"""
