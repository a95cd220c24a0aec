"""``minivllm bench``: measured speed, always against something and always in turn."""
