"""JSON schemas made sound: what is accepted, rewritten or refused so that all that is written is valid.

May import: the vocabulary only.
Door: `sound_schema` in json_schema.py.
"""
