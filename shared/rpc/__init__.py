"""Generated from `proto/` by `make proto`, and checked in. A test compares the two; nothing here is written by hand."""
