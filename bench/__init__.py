"""Measurements, by what is measured. Speed claims live here, never in timed tests.

__main__.py   `twostroke bench`: workloads against a server that runs, or `compare`
load/         requests, workloads and what follows from their arrivals; knows no engine
compare/      the same work on several engines, one at a time; starts and stops them
fleet/        what a thousand workers cost a router
handoff/      what handing a prompt over costs; how fast each transport is
failover/     what clients feel when a worker is killed
kernels/      kernels beside the limits of the CPU or GPU they run on
reports/      the last reports that the documents quote
"""
