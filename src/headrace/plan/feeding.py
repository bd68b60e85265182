"""What training eats: tokens or samples a second times their size; per GPU, per node and in all."""

from __future__ import annotations

from headrace.errors import UsageError
from headrace.plan import units
from headrace.plan.job import Job
from headrace.plan.model import Model
from headrace.plan.quantities import Answer, Formula, Question, Range

_WORK = units.Unit.of("flop/param/token")
#: Forward 2, backward 4. Attention comes on top, and is left out as in the rates that this is held against.
WORK = Range.point(6.0, _WORK, source="2 forward, 4 backward")

TOKENS = Formula(
    result="tokens a second, of a GPU",
    text="achieved / (6 * active parameters)",
    unit=units.TOKEN_RATE,
    symbols={"achieved": units.FLOP_RATE, "six": _WORK, "active parameters": units.PARAMETERS},
    source="6 FLOP a parameter and token (Kaplan et al. 2020)",
    function=lambda achieved, six, active_parameters: achieved / (six * active_parameters),
)

TOKEN_BYTES = Formula(
    result="tokens, for a GPU",
    text="tokens a second * bytes of a token",
    unit=units.RATE_PER_GPU,
    symbols={"tokens a second": units.TOKEN_RATE, "bytes of a token": units.BYTES_PER_TOKEN},
    source="arithmetic",
    function=lambda tokens_a_second, bytes_of_a_token: tokens_a_second * bytes_of_a_token,
)

READS = Formula(
    result="reads a second, of a GPU",
    text="tokens a second / sequence",
    unit=units.Unit.of("read/s/gpu"),
    symbols={"tokens a second": units.TOKEN_RATE, "sequence": units.Unit.of("token/read")},
    source="one read a sequence",
    function=lambda tokens_a_second, sequence: tokens_a_second / sequence,
)

SAMPLE_READS = Formula(
    result="reads of samples a second, of a GPU",
    text="samples a second * reads of a sample",
    unit=units.Unit.of("read/s/gpu"),
    symbols={"samples a second": units.SAMPLE_RATE, "reads of a sample": units.Unit.of("read/sample")},
    source="one read a sample; whether storage answers so many is to be measured: only bytes are reckoned with",
    function=lambda samples_a_second, reads_of_a_sample: samples_a_second * reads_of_a_sample,
)

SAMPLE_BYTES = Formula(
    result="samples, for a GPU",
    text="samples a second * bytes of a sample",
    unit=units.RATE_PER_GPU,
    symbols={"samples a second": units.SAMPLE_RATE, "bytes of a sample": units.BYTES_PER_SAMPLE},
    source="MLPerf Storage: batch * record / compute time",
    function=lambda samples_a_second, bytes_of_a_sample: samples_a_second * bytes_of_a_sample,
)

BOTH = Formula(
    result="tokens and samples, for a GPU",
    text="tokens + samples",
    unit=units.RATE_PER_GPU,
    symbols={"tokens": units.RATE_PER_GPU, "samples": units.RATE_PER_GPU},
    source="arithmetic",
    function=lambda tokens, samples: tokens + samples,
)

IN_ALL = Formula(
    result="needed to read, in all",
    text="for a GPU * gpus * copies",
    unit=units.RATE,
    symbols={"for a GPU": units.RATE_PER_GPU, "gpus": units.GPUS, "copies": units.COUNT},
    source="copies: ranks of one replica that read the same for themselves, at most tensor ranks * (first, last stage)",
    function=lambda for_a_GPU, gpus, copies: for_a_GPU * gpus * copies,
)

PER_NODE = Formula(
    result="needed to read, per node",
    text="in all / nodes",
    unit=units.RATE_PER_NODE,
    symbols={"in all": units.RATE, "nodes": units.NODES},
    source="nodes count as full ones: a last one with fewer GPUs moves less",
    function=lambda in_all, nodes: in_all / nodes,
)

UTILISATION = Formula(
    result="accelerators busy, as far as feeding goes",
    text="min(1, there / needed)",
    unit=units.SHARE,
    symbols={"there": units.RATE, "needed": units.RATE},
    source="MLPerf Storage's accelerator utilisation, where reading runs ahead of computing",
    function=lambda there, needed: min(1.0, there / needed) if needed else 1.0,
)


class Feeding:
    """`per_gpu`, `in_all`: Ranges of B/s/gpu and B/s. Raises `UsageError` where a part of an answer is missing."""

    def __init__(self, job: Job, model: Model, nodes: Range) -> None:
        samples = job.has("feed.samples_per_s") or job.has("feed.sample_bytes")
        if samples and not job.has("feed.samples_per_s", "feed.sample_bytes"):
            missing = "feed.sample_bytes" if job.has("feed.samples_per_s") else "feed.samples_per_s"
            raise UsageError("samples are said in half", expected=f"{missing}, too")
        #: Tokens are eaten, unless samples are all that was said.
        tokens = not samples or job.has("feed.tokens_per_s")
        self.answers: list[Answer] = []
        parts: list[Range] = []
        if tokens:
            rate = job.range("feed.tokens_per_s")
            if rate is None:
                achieved = job.need("feed.achieved")
                put = {"achieved": achieved, "six": WORK, "active parameters": model.active}
                rate = self._add(TOKENS.put(put))
            put = {"tokens a second": rate, "sequence": job.need("feed.sequence")}
            self._add(READS.put(put))
            put = {"tokens a second": rate, "bytes of a token": job.need("feed.token_bytes")}
            parts.append(self._add(TOKEN_BYTES.put(put)))
        if samples:
            rate = job.need("feed.samples_per_s")
            one = Range.point(1.0, units.Unit.of("read/sample"))
            self._add(SAMPLE_READS.put({"samples a second": rate, "reads of a sample": one}))
            put = {"samples a second": rate, "bytes of a sample": job.need("feed.sample_bytes")}
            parts.append(self._add(SAMPLE_BYTES.put(put)))
        if len(parts) == 2:
            parts = [self._add(BOTH.put({"tokens": parts[0], "samples": parts[1]}))]
        self.per_gpu = parts[0]
        gpus = Range.point(model.gpus, units.GPUS)
        copies = Range(1.0, 1.0, float(model.tp * min(model.pp, 2)), units.COUNT)
        self.in_all = self._add(IN_ALL.put({"for a GPU": self.per_gpu, "gpus": gpus, "copies": copies}))
        self.per_node = self._add(PER_NODE.put({"in all": self.in_all, "nodes": nodes}))

    def _add(self, answer: Answer) -> Range:
        self.answers.append(answer)
        return answer.value

    def question(self, there: Range) -> Question:
        busy = UTILISATION.put({"there": there, "needed": self.in_all})
        return Question(name="feeding", title="How fast must data come?", answers=(*self.answers, busy))
