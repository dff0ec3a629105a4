"""Studies: many runs from one file, and the sweep that makes them.

`experiment.py` reads a study file and spells out its cells; `settings.py` has the command line's own parser read each;
`planned.py` says what it trains, what it is called and what it costs; `sweep.py` makes the runs; `results.py` writes
down what came out. A sweep leaves in its folder:

study.json          which run belongs to which cell, its labels, settings and command
results.csv         one line per cell: labels, status, steps, tokens, final losses
NAME/               a run folder (depthlit/runs.py), and in it
NAME/log.txt        what the run printed, over all attempts
NAME/sweep.json     its attempts; "finished": true is written last
claims/             who is at work on which run
"""
