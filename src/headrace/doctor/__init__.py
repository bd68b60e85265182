"""`headrace doctor`: what is wrong with this machine and its storage.

machine.py    reads a machine, this one or a recorded one
facts/        what it shows, one file a domain
verdict.py    which of five words fits a piece of storage; storage.py: which pieces there are
probe.py, touch.py, tcp.py    what only a measurement shows: of a target, of a disk or file system, of the way there
checks/       what is wrong, one file a domain; finding.py: one finding
rate.py       how much storage delivers, where that is asked
examine.py    all of it in order; describe.py, report.py, page.py: told as text and as a page
record.py     the files that were read, kept for a bug report, with names replaced
compare.py    reports of several nodes, beside each other
"""
