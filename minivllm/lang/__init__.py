"""A language of programs: functions that generate,
choose and branch on a text whose prefix stays in the cache.

May import: frontend, multimodal, multimodal.files, processing, tokenizer.
Door: `State` in state.py, `program` and its parts in run.py, `user` and its parts in roles.py.
"""

from minivllm.lang.choose import Selected
from minivllm.lang.roles import Image, assistant, image, system, tool, user
from minivllm.lang.run import Outcome, Program, join, program, run_batch, run_offline
from minivllm.lang.state import Generated, State

__all__ = [
    "Generated",
    "Image",
    "Outcome",
    "Program",
    "Selected",
    "State",
    "assistant",
    "image",
    "join",
    "program",
    "run_batch",
]
__all__ += ["run_offline", "system", "tool", "user"]
