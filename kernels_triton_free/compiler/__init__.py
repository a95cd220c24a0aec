"""What plain PyTorch has no word for, said to the compiler.

May import: torch only.
Door: `materialize` in materialize.py.
"""
