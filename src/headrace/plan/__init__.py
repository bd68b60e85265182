"""How much storage a training job needs, and which: arithmetic with ranges, and a catalogue of what providers claim.

    plan = make_plan(read_job(None, {"gpus": 64, "model.parameters": "8B"}))
    print(plan.verdict.sentence)

`quantities.py` has ranges and formulas, `units.py` their units; `fields.py` everything that a job may say, and what is
assumed where it does not, `job.py` reads it. `model`, `feeding`, `checkpoint`, `network`, `storage`, `goodput` (on
`situation` and `extremes`) and `money` answer a question each; `cures.py` and `verdict.py` draw the conclusion;
`catalogue.py` and `expect.py` are about claims. Nothing here measures anything, or opens a device.
"""

from __future__ import annotations

from headrace.plan.catalogue import Catalogue, Claim, Offering, load_catalogue
from headrace.plan.expect import Comparison, Measured, compare
from headrace.plan.job import Job, read_job
from headrace.plan.plan import Plan, make_plan
from headrace.plan.quantities import Answer, Formula, Question, Range
from headrace.plan.verdict import Verdict

__all__ = [
    "Answer",
    "Catalogue",
    "Claim",
    "Comparison",
    "Formula",
    "Job",
    "Measured",
    "Offering",
    "Plan",
    "Question",
    "Range",
    "Verdict",
    "compare",
    "load_catalogue",
    "make_plan",
    "read_job",
]
