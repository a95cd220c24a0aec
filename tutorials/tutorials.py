"""Lets ``python tutorials/t04_continuous_batching.py`` run from any directory.

Python looks for modules beside a script first, so a chapter's ``import tutorials.lesson`` finds this file. It
puts the folder above on the path instead, and the package of that name takes its place.
"""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]
del sys.modules["tutorials"]
importlib.import_module("tutorials")
