"""GPU code, generated and compiled on a machine without a GPU. See README.md."""
