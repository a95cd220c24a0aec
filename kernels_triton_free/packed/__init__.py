"""Weights in the order in which compiled code reads them: tiles for many rows, words for few, on CPUs.

Packed by oneDNN, or codes of 4 and 8 bits, or whole numbers.

May import: kernels_triton_free, kernels_triton_free.compiler.
Door: `few_rows_linear` and `few_rows_products` in rows.py, `tiled_linear` in tiles.py, `int4_tiled_linear` in
int4_tiles.py, `int8_tiled_linear` in int8_tiles.py, `code_words_linear` in code_words.py,
`whole_numbers_linear` in whole_numbers.py, `memory_of` in memory.py.
"""
