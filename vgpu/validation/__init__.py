"""Timing kernels, their measured times on an H200, and what is needed to measure them again.

`kernels` describes the kernels (PTX for sm_90a, launch, arguments, expected output); `capture` runs them on a GPU;
`h200_times.json` holds the times.
"""
