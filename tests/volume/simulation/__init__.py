"""A volume in a world that is as bad as the specification of NVMe allows, one device command at a time.

    python -m tests.volume.simulation --seeds 10000        a long run; prints each seed that fails
    python -m tests.volume.simulation --seed 17 --trace    that one again, with every command

`world` decides which process does its next device command, and what happens to it, as often as its `weather` says;
`actor` is a process that stops before each; `actors` are what they do: writers, ranks, readers; `chain` knows which
states anybody may see; `rules` can be switched off, one by one.
"""
