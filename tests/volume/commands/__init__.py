"""Commands that are ended anywhere: `cp` in and out, `scrub --repair` and `takeover`, by Ctrl-C, SIGTERM and SIGKILL.

    python -m tests.volume.commands --rounds 30

Afterwards the volume verifies, all that was acknowledged is there, a copy in one commit is there whole or not at all,
and no file has a name that is not whole.
"""
