"""Where KV blocks lie, and how many fit.

in     a worker's options, the model's geometry, what memory is free
out    a pool of blocks, which kernels compute with and transfers read and write

sizing.py         longest sequence, tokens of a step, number of blocks; refusals that name the flags
main_memory.py    what the machine and the container leave this process
pool_memory.py    a pool's bytes: of this process alone, or shared with others of the machine
kv_pool.py        the pool: its layout, and reading and writing of whole blocks and parts of them
"""
