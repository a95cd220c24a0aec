"""What queries are cut into, and which blocks each part reads: numbers on the host.

May import: models.
Doors: `blocks_read` in tile_lists.py, `cut_chunks` in chunk_tiles.py.
"""
