"""Real processes on one machine under load, and faults at random: see `docs/reliability.md`."""
