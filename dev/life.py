#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prints docs/life.md from src/shard/life.h: the life of a unit, as tables and pictures.

    dev/life.py > docs/life.md
    dev/life.py --check         exit status 1 where docs/life.md is not what would be printed
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCE = os.path.join(ROOT, "src/shard/life.h")
PAGE = os.path.join(ROOT, "docs/life.md")


def rows(text, name):
    """The X(...) rows of a table, each a list of its columns as written."""
    start = text.index("#define %s(X)" % name)
    lines = []
    for line in text[start:].split("\n")[1:]:
        lines.append(line.rstrip("\\ "))
        if not line.endswith("\\"):
            break
    body, out, depth, column, quoted = "\n".join(lines), [], 0, "", False
    for c in body:
        if quoted or c == '"':
            column += c
            quoted = quoted != (c == '"')
        elif c == "(" and depth == 0:
            depth, row, column = 1, [], ""
        elif depth == 1 and c in ",)":
            row.append(" ".join(column.split()))
            column = ""
            if c == ")":
                depth = 0
                out.append(row)
        elif depth > 0:
            depth += {"(": 1, ")": -1}.get(c, 0)
            column += c
    return out


def unquote(s):
    return "".join(re.findall(r'"([^"]*)"', s))


def short(name):
    return re.sub(r"^FSDPI_(GRAD_|EV_)?", "", name)


def comment(text):
    """The lines of the file's first comment, without the stars."""
    return [line.strip().lstrip("*").rstrip() for line in text[:text.index("*/")].split("\n")]


def invariants(lines):
    out = []
    for line in lines:
        m = re.match(r"\s+(I\d+)\s+(.*)", line)
        if m:
            out.append([m.group(1), m.group(2)])
        elif out and re.match(r"\s{6,}\S", line):
            out[-1][1] += " " + line.strip()
    return out


def table(head, body):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(r) + " |" for r in body]
    return "\n".join(lines) + "\n"


def picture(moves):
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += ["    %s --> %s : %s" % (short(a), short(b), unquote(when).replace(":", " -").replace(";", ",")) for a, b, when in moves]
    return "\n".join(lines + ["```"]) + "\n"


def page():
    with open(SOURCE, encoding="utf-8") as f:
        text = f.read()
    lines = comment(text)
    conditions = {r[0]: (unquote(r[1]), unquote(r[2])) for r in rows(text, "FSDPI_CONDITION_MAP")}
    out = ["# The life of a unit", ""]
    out += ["Printed by `dev/life.py` from `src/shard/life.h`, which is what the code checks calls against: change it there. A test",
            "fails where this page is stale; `tests/shard/life_test.c` walks the tables. At log level DEBUG (`fsdp/log.h`) each move of a unit",
            "is a line.", ""]
    out += ["A unit is in two states at once, one of its parameters and one of its gradient; outside of passes it is idle,",
            "summoned or in a step.", ""]
    for title, states, moves in (("Residency of parameters", "FSDPI_RESIDENCY_MAP", "FSDPI_RESIDENCY_MOVE_MAP"),
                                 ("Gradient in flight", "FSDPI_GRADIENT_MAP", "FSDPI_GRADIENT_MOVE_MAP")):
        out += ["## " + title, ""]
        out += [table(["state", "in messages"], [["`%s`" % short(r[0]), unquote(r[1])] for r in rows(text, states)])]
        found = rows(text, moves)
        out += [picture(found)]
        out += [table(["from", "to", "when"], [["`%s`" % short(a), "`%s`" % short(b), unquote(w)] for a, b, w in found])]
    out += ["## Calls", "", "A call whose conditions do not all hold returns `FSDP_ERR_STATE`, says which one, the unit's state and the way out, and",
            "changes nothing. So does, whatever its state, a call that comes from another thread while one is under way on the same",
            "communicator, or from within a function of the program that the one under way has called (`src/comm/call.h`); there",
            "`fsdp_unit_param` and `fsdp_unit_grad` may be called, which ask nobody.", ""]
    events = []
    for name, call, needs, does in rows(text, "FSDPI_EVENT_MAP"):
        wanted = re.findall(r"FSDPI_C\((\w+)\)", needs)
        for c in wanted:
            if c not in conditions:
                sys.exit("life.py: %s needs %s, which is in no table" % (name, c))
        events.append(["`%s`" % unquote(call), " ".join("`%s`" % short(c) for c in wanted), unquote(does)])
    out += [table(["call", "conditions", "what it does"], events)]
    out += ["## Conditions", ""]
    out += [table(["condition", "where it does not hold", "the way out"], [["`%s`" % short(c), a, b] for c, (a, b) in conditions.items()])]
    out += ["## Invariants", "", "Asserted after every call in debug builds (`fsdpi_unit_check`).", ""]
    out += [table(["", "always"], invariants(lines))]
    return "\n".join(out).rstrip() + "\n"


def main():
    text = page()
    if "--check" not in sys.argv[1:]:
        sys.stdout.write(text)
        return 0
    with open(PAGE, encoding="utf-8") as f:
        if f.read() == text:
            return 0
    print("docs/life.md is stale: run dev/life.py > docs/life.md", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
