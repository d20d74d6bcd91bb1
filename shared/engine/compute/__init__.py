"""How a step is computed: a plan goes in, sampled tokens come out.

runner.py            copies blocks, runs the model on the plan's tokens, samples
batch.py             plan ─> tensors: one flattened run of tokens
decode_graphs.py     on a GPU, steps of single tokens as CUDA graphs
staging.py           from numpy to the device
sampler.py           logits ─> tokens; with penalties.py, and uniform.py for the random numbers
layer_progress.py    on a CPU, which layers of a prompt are computed while the step goes on
"""
