"""How the tokens of a layer learn of one another: attention's projections, and mixers that keep a state.

May import: compilation, kernels_triton_free, kernels_triton_free.state, linear, linear.methods, models,
program, specs.
Door: `Mixer` in mixer.py, `make_mixer` in factory.py.
"""
