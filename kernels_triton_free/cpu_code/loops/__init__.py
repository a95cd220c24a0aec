"""Loops that Inductor writes in place of its templates: sums over rows of packed weights, or whole numbers.

May import: kernels_triton_free.compiler, kernels_triton_free.packed.
Doors: `generate_packed_row_loops` in packed_rows.py, `generate_word_loops` in word_loops.py,
`generate_whole_number_loops` in whole_number_loops.py.
"""
