"""Do the tests notice? Small faults are put into the code one at a time, and each must fail some fast test.

groups.py      which modules are mutated, and which tests are to notice it
workspace.py   a copy of the project per group, in which mutmut runs
results.py     what mutmut left behind, counted by module
__main__.py    `make mutants`: all groups, a table, and a report in bench/reports
"""
