"""What plain PyTorch has no word for, said to the compiler.

May import: torch only.
Door: `materialize` in materialize.py, `define_as_one` in as_one.py, `quick_silu_product` in quick_silu.py,
`quick_log` and `quick_log1p_of_minus` in quick_log.py, `try_to_change` in changes.py.
"""
