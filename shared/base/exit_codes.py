"""Exit codes that a supervisor understands."""

CONFIG_ERROR = 2  # what the operator can mend: the last line on stderr says what
BROKEN = 70  # a part that the process cannot do without has failed; start it again
INTERRUPTED = 130  # Ctrl-C
