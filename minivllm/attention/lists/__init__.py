"""What queries are cut into, and which blocks each part reads: numbers on the host.

May import: kernels_triton_free.strips, specs.
Doors: `bounds_of` and `look_ahead` in bounds.py, `blocks_read` and `cut_tiles` in tile_lists.py, `list_pairs`
in pair_lists.py, `groups_of_step` and `bundles_of` in key_groups.py, `in_step_order` in step_order.py,
`find_shared` in shared_prefixes.py, `group_rows` and `blocks_of_tiles` in row_groups.py.
"""
