"""What every test process needs before anything else is imported."""

import os

# As in service: idle OpenMP threads sleep. Spinning ones would take the cores from the servers under test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
