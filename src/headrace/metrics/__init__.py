"""What the loaders of a node do, and how its paths are: as a dictionary, and for Prometheus.

    with TokenLoader(...) as loader, NodeMetrics(loader, port=0) as metrics:      # on every rank
        ...
        metrics.node()         # all ranks of this node
        metrics.address        # of the HTTP server; local rank 0 has one

Every rank answers on a Unix socket in a directory of the run; who wants to know asks all of them. Nothing is sent, and
nothing runs, while nobody asks. A rank that has died, or that comes late, does no harm: it is not there, or it is.

names.py       every metric: name, unit, meaning
report.py      what one rank says; what a node's ranks say together
folder.py      the directory of the run on this node
answers.py     a rank's socket, and asking all of them
node.py        `NodeMetrics`
prometheus.py  the same for Prometheus (extra `metrics`)
"""

from __future__ import annotations

from headrace.metrics.names import METRICS, Metric
from headrace.metrics.node import NodeMetrics
from headrace.metrics.report import Source

__all__ = ["METRICS", "Metric", "NodeMetrics", "Source"]
