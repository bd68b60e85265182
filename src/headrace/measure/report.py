"""One HTML page that needs nothing but itself: no network, no script, no font; light, dark and on paper.

page = Page("headrace demo", verdict="Storage cost 2.1 % ...")
page.section("Loss", line_chart(...), note="Both runs lie on each other.")
page.table("Checkpoints", ["step", "time"], [["6", "0.4 s"]])
Path("report.html").write_text(page.html())
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, kw_only=True)
class Html:
    """Text that is HTML already (a badge in a table's cell); everything else is escaped."""

    text: str


def badge(good: bool, text: str) -> Html:
    """A proof, held or not: a mark and a word, so that it does not hang on colour."""
    return Html(text=f'<span class="badge {"good" if good else "bad"}">{"✓" if good else "✗"} {escape(text)}</span>')


class Page:
    """A page in the making; `html()` gives it. Text is escaped; charts (which are markup) are taken as they are."""

    def __init__(self, title: str, *, verdict: str, subtitle: str = "") -> None:
        self._title = title
        self._verdict = verdict
        self._subtitle = subtitle
        self._parts: list[str] = []

    def cards(self, cards: Sequence[tuple[str, str, str]]) -> None:
        """(figure, what it is, a small remark) each."""
        cells = "".join(
            f'<div class="card"><b>{_text(figure.replace("-", _HYPHEN))}</b><span>{_text(name)}</span>'
            f"<small>{_text(remark)}</small></div>"
            for figure, name, remark in cards
        )
        self._parts.append(f'<div class="cards">{cells}</div>')

    def section(self, heading: str, *markup: str, note: str = "") -> None:
        about = f'<p class="quiet">{_text(note)}</p>' if note else ""
        self._parts.append(f"<section><h2>{escape(heading)}</h2>{about}{''.join(markup)}</section>")

    def table(
        self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str | Html]], *, note: str = ""
    ) -> None:
        self.section(heading, table(columns, rows), note=note)

    def facts(self, heading: str, facts: Mapping[str, str]) -> None:
        """Names and values, two columns."""
        rows = "".join(f"<tr><th>{escape(k)}</th><td>{_text(v)}</td></tr>" for k, v in facts.items())
        whole = " whole" if len(facts) <= _SHORT else ""
        self.section(heading, f'<div class="scroll"><table class="facts{whole}">{rows}</table></div>')

    def html(self) -> str:
        subtitle = f'<p class="subtitle">{_text(self._subtitle)}</p>' if self._subtitle else ""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style></head><body><main>"
            f"<header><h1>{escape(self._title)}</h1>{subtitle}</header>"
            f'<p class="verdict">{_text(self._verdict)}</p>'
            f"{''.join(self._parts)}</main></body></html>\n"
        )


def table(columns: Sequence[str], rows: Sequence[Sequence[str | Html]]) -> str:
    """A table as markup, for a section of several parts. Columns without a name have no head."""
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    # On paper it is not cut where a page can hold it.
    whole = ' class="whole"' if len(rows) <= _SHORT else ""
    body = "".join("<tr>" + "".join(f"<td{_width(c)}>{_cell(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table{whole}>{head}<tbody>{body}</tbody></table></div>'


def _width(value: str | Html) -> str:
    """What is short stays on one line, and a sentence has room: narrow screens push the table sideways."""
    if isinstance(value, Html):
        return ""
    length = len(value)
    return ' class="long"' if length > 40 else ' class="short"' if length <= 20 else ' class="text"'


def _cell(value: str | Html) -> str:
    return value.text if isinstance(value, Html) else _text(value)


#: A number, and a unit that stays on its line.
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[kKMGT]?i?B(?:/s)?|[KMGT]?bit/s|GPU-seconds|[num]?s|min|h|d)(?!\w))")
_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def _text(text: str) -> str:
    """As markup; a line does not end between a number and its unit."""
    return escape(_UNIT.sub("\N{NO-BREAK SPACE}", text))


_SHORT = 14

#: Colours of what a step's time goes to, as (light, dark). Any two are told apart by people who do not see red, green
#: or blue, too (a test computes it). `bad`: lost, failed.
PARTS = {
    "compute": ("#a9c1d8", "#4b5f74"),
    "fetch": ("#d9480f", "#ff8a50"),
    "blocked": ("#c2ab24", "#f2cf3a"),
    "preparation": ("#1f87a6", "#35b4f0"),
    "bad": ("#231f20", "#f6f7f8"),
    "copy": ("#30b088", "#1f9a80"),
    "collective": ("#838a93", "#a4abb8"),
    "straggler": ("#bd7be0", "#c04fc0"),
    "checkpoint": ("#6a1fa8", "#6f63f2"),
    "restart": ("#1f5c3c", "#a3f3b4"),
    "idle": ("#dcdfe2", "#343a41"),
}
_ALIKE = {"data_wait": "fetch", "starved": "bad", "other": "idle", "rework": "blocked"}


def _variables(theme: int) -> str:
    return ";".join(f"--{name}:{colours[theme]}" for name, colours in PARTS.items())


def _fills() -> str:
    names = {name: name for name in PARTS} | _ALIKE
    return "".join(f".part.{each},i.{each}{{fill:var(--{of});background:var(--{of})}}" for each, of in names.items())


_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--fg:#1d2126;--soft:#5d6670;--line:#e1e3e6;--panel:#fff;--accent:#0b6e8f;
--shade:rgba(0,0,0,.16);--warn:#b8400a;--good:#187a45;--error:#c92a2a;LIGHT;
--s0:#0b6e8f;--s1:#d9480f;--s2:#7048c8;--s3:#8a939c;--s4:#0b8479;--s5:#9a7600}
@media screen and (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e8ea;--soft:#9aa4ae;--line:#2c3238;
--panel:#1b1f23;--accent:#5cc3e4;--shade:rgba(0,0,0,.6);--warn:#ff8a50;--good:#4ade80;--error:#ff7b7b;DARK;
--s0:#5cc3e4;--s1:#ff8a50;--s2:#a78bfa;--s3:#8a939c;--s4:#2dd4bf;--s5:#e3b341}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1040px;margin:0 auto;padding:36px 20px 60px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}
h2{font-size:17px;margin:0 0 6px}
.subtitle{margin:2px 0 0;color:var(--soft)}
.verdict{margin:20px 0;padding:16px 20px;background:var(--panel);border:1px solid var(--line);
border-left:5px solid var(--accent);border-radius:6px;font-size:18px;line-height:1.45}
.verdict,.subtitle,.card,.key,.quiet,li{overflow-wrap:anywhere}
section{margin:18px 0;padding:18px 20px;background:var(--panel);border:1px solid var(--line);border-radius:6px;
break-inside:avoid}
.quiet{color:var(--soft);margin:0 0 10px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.card{padding:12px 14px;background:var(--panel);border:1px solid var(--line);border-radius:6px;break-inside:avoid}
.card b{display:block;font-size:20px;line-height:1.3;font-variant-numeric:tabular-nums}
.card span{display:block}
.card small{color:var(--soft)}
svg{display:block;width:100%;height:auto;font:11px system-ui,sans-serif}
svg text{fill:var(--soft)}
svg .lane,svg .note{fill:var(--fg)}
svg .note{paint-order:stroke;stroke:var(--panel);stroke-width:4px;stroke-linejoin:round}
svg .inside{fill:#1d2126;font-weight:600;paint-order:stroke;stroke:rgba(255,255,255,.8);stroke-width:3px;
stroke-linejoin:round}
.grid{stroke:var(--line);stroke-width:1}
.base{stroke:var(--soft);stroke-width:1}
.event{stroke-width:1.3;stroke-dasharray:4 3}
.event.good{stroke:var(--good)}.event.bad{stroke:var(--error)}.event.idle{stroke:var(--soft)}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.curve.s0{stroke:var(--s0)}.curve.s1{stroke:var(--s1);stroke-dasharray:9 3}
.curve.s2{stroke:var(--s2);stroke-dasharray:3 3}.curve.s3{stroke:var(--s3);stroke-width:6;stroke-opacity:.45}
.curve.s4{stroke:var(--s4);stroke-dasharray:9 3 2 3}.curve.s5{stroke:var(--s5);stroke-dasharray:5 4}
.span{stroke-width:3;stroke-linecap:round;stroke-opacity:.55}
.span.s0{stroke:var(--s0)}.span.s1{stroke:var(--s1)}.span.s2{stroke:var(--s2)}
.dot.s0{fill:var(--s0)}.dot.s1{fill:var(--s1)}.dot.s2{fill:var(--s2)}.dot.s3{fill:var(--s3)}.dot.s4{fill:var(--s4)}
.dot.s5{fill:var(--s5)}
.part{stroke:var(--panel);stroke-width:.7}.thin{stroke:none}FILLS
.part.good,i.good{fill:var(--good);background:var(--good)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:2px 0 8px;font-size:13px;color:var(--soft)}
.key{display:inline-flex;align-items:center;gap:6px}
i.box{width:12px;height:12px;border-radius:2px}
svg.sample{width:30px;height:12px;flex:none}
.scroll,section{overflow-x:auto}
.scroll{background:linear-gradient(90deg,var(--panel) 30%,transparent) 0 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--panel) 30%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(90deg,var(--shade),transparent) 0 0/12px 100% no-repeat scroll,
linear-gradient(270deg,var(--shade),transparent) 100% 0/12px 100% no-repeat scroll}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 11px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom}
.short{white-space:nowrap}.text{min-width:8em}.long{min-width:9em;overflow-wrap:anywhere}
tr:last-child th,tr:last-child td{border-bottom:0}
.facts th{width:11em;color:var(--soft);font-weight:600}
.facts td{overflow-wrap:anywhere}
.badge{font-weight:600;white-space:nowrap}
.badge.good{color:var(--good)}.badge.bad{color:var(--error)}.badge.warn{color:var(--warn)}.badge.quiet{color:var(--soft)}
.finding{padding:12px 0;border-top:1px solid var(--line);break-inside:avoid}
.finding:first-of-type{border-top:0}
section:has(.finding){break-inside:auto}
.finding h3{font-size:15px;margin:0 0 4px}
.finding h3 small{color:var(--soft);font-weight:400}
.finding .facts th{width:6em;min-width:6em}
.finding .facts th,.finding .facts td{border-bottom:0;padding-top:2px;padding-bottom:2px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;overflow-wrap:anywhere}
@media screen and (max-width:600px){main{padding:20px 12px 40px}section{padding:14px}
.scroll>svg{min-width:640px;font-size:12px}.long{min-width:17em}}
@media print{body{background:#fff;font-size:12px}.cards{grid-template-columns:repeat(auto-fit,minmax(115px,1fr))}
main{max-width:none;padding:0 1px}
section,.card,.verdict{background:#fff}
section{break-inside:auto}svg,tr,h2,.quiet,.whole{break-inside:avoid}h2,h2+.quiet,.legend{break-after:avoid}
.scroll,section{overflow:visible}.scroll{background:none}table{font-size:10px}th,td{padding-right:6px}
.long{min-width:8em}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
_STYLE = (
    _STYLE.replace("LIGHT", _variables(0)).replace("DARK", _variables(1)).replace("FILLS", _fills()).replace("\n", "")
)
