"""How much room, and what it costs. Prices are given; nothing is shown of what nobody gave."""

from __future__ import annotations

from headrace.plan import units
from headrace.plan.job import Job
from headrace.plan.quantities import Answer, Formula, Question, Range

MONTH = Range.point(30 * 86_400.0, units.SECONDS, source="30 days")
_PRICE_OF_BYTE = units.Unit.of("price/B")

DATASET = Formula(
    result="size of the dataset",
    text="tokens * bytes of a token",
    unit=units.BYTES,
    symbols={"tokens": units.TOKENS, "bytes of a token": units.BYTES_PER_TOKEN},
    source="arithmetic",
    function=lambda tokens, bytes_of_a_token: tokens * bytes_of_a_token,
)

ROOM = Formula(
    result="room",
    text="dataset + (keep + 1) * size of a checkpoint",
    unit=units.BYTES,
    symbols={"dataset": units.BYTES, "keep": units.COUNT, "size of a checkpoint": units.BYTES},
    source="those that are kept, and the one that is being written",
    function=lambda dataset, keep, size_of_a_checkpoint: dataset + (keep + 1) * size_of_a_checkpoint,
)

RENT = Formula(
    result="storage costs a month",
    text="room * price",
    unit=units.PRICE,
    symbols={"room": units.BYTES, "price": _PRICE_OF_BYTE},
    source="arithmetic",
    function=lambda room, price: room * price,
)

IDLE = Formula(
    result="GPUs that storage keeps waiting cost",
    text="share * gpus * price of a GPU hour",
    unit=units.PRICE_PER_SECOND,
    symbols={"share": units.SHARE, "gpus": units.GPUS, "price of a GPU hour": units.PRICE_PER_GPU_HOUR},
    source="arithmetic",
    function=lambda share, gpus, price_of_a_GPU_hour: share * gpus * price_of_a_GPU_hour,
)

IDLE_MONTH = Formula(
    result="the same, a month",
    text="waiting * month",
    unit=units.PRICE,
    symbols={"waiting": units.PRICE_PER_SECOND, "month": units.SECONDS},
    source="arithmetic",
    function=lambda waiting, month: waiting * month,
)

RESTART = Formula(
    result="loading of one restart costs",
    text="load * gpus * price of a GPU hour",
    unit=units.PRICE,
    symbols={"load": units.SECONDS, "gpus": units.GPUS, "price of a GPU hour": units.PRICE_PER_GPU_HOUR},
    source="arithmetic: all GPUs wait",
    function=lambda load, gpus, price_of_a_GPU_hour: load * gpus * price_of_a_GPU_hour,
)


def room(job: Job, size: Range) -> list[Answer]:
    dataset = job.range("feed.dataset")
    answers: list[Answer] = []
    tokens = job.range("feed.tokens")
    if dataset is None and tokens is not None:
        answers.append(DATASET.put({"tokens": tokens, "bytes of a token": job.need("feed.token_bytes")}))
        dataset = answers[0].value
    put = {
        "dataset": dataset or Range.point(0, units.BYTES),
        "keep": job.need("checkpoint.keep"),
        "size of a checkpoint": size,
    }
    answers.append(ROOM.put(put, note="" if dataset else "the dataset's size was not said, and is not counted"))
    return answers


def question(job: Job, *, size: Range, gpus: Range, share: Range, load: Range) -> Question:
    """`share`: of the time, that storage costs; `load`: of one restart."""
    answers = room(job, size)
    price = job.range("price.gb_month")
    if price is not None:
        answers.append(RENT.put({"room": answers[-1].value, "price": price}))
    hour = job.range("price.gpu_hour")
    if hour is not None:
        idle = IDLE.put({"share": share, "gpus": gpus, "price of a GPU hour": hour})
        answers += [idle, IDLE_MONTH.put({"waiting": idle.value, "month": MONTH})]
        answers.append(RESTART.put({"load": load, "gpus": gpus, "price of a GPU hour": hour}))
    note = "" if hour is not None else "what waiting GPUs cost: unknown without --gpu-hour-price"
    return Question(name="money", title="How much room, and what does it cost?", answers=tuple(answers), note=note)
