"""Kernels beside the limits of the machine: each script prints its figures and what the machine could do in the same run.

cpu_linear.py  cpu_attention.py  cpu_chunks.py     the C++ backend
gpu_check.py ─> gpu_kernels.py, gpu_decode_step.py, gpu_engine.py     the Triton backend; gpu_timing.py is their clock
"""
