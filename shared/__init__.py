"""What the processes have in common. Imports run downwards in this order; what lies below models and kernels works without torch.

worker/      what a prefill and a decode process share
transfer/    the handoff of KV blocks, and how its bytes travel
engine/      schedule (pure), compute, memory, and the loop around them
models/      from files to a decoder
kernels/     one interface, several backends
index/       workers and prefix blocks in Redis
wire/        gRPC servers and channels, conversions; rpc/ is generated from proto/
process/     logs, metrics, tasks, readiness
options/     configuration
base/        values and errors that everything knows
"""
