"""What crosses between an executor and its worker processes: records, answers, log lines, last words.

May import: config, distributed, kv_transfer.
Door: `Channel` in records.py.
"""
