"""Accidents on a scratch volume, on purpose: can this storage be trusted with a job that is not alone any more?

run.py         the drill: options, scenarios in their order, the verdict
scenarios.py   each accident, step by step
world.py       the volume, who takes it over, what was acknowledged and must be there
job.py         a job of two processes, from outside: told, stopped, killed
node.py        the same from inside
content.py     what a shard holds
media.py       bytes where they lie: did a late write move one?
hooks.py       what only the user can do: restart a target, cut a link
report.py      what was found, for people and as JSON

Nothing is imported here: each process of a job would pay for all of it.
"""
