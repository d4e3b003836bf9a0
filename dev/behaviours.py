#!/usr/bin/env python3
# Checks docs/behaviours.md: each row's tests exist. A test is named as `folder/file_test` name name ...; an example as
# `examples/name`. Rows without a test must say "not yet" or "n/a". Prints how many there are of each.
import os
import re
import sys

root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def registered(path):
    with open(path) as f:
        return set(re.findall(r"cmocka_unit_test\w*\((\w+)", f.read()))


def check(number, cell):
    bad = []
    named = re.findall(r"`([\w/]+)`((?: \w+)*)", cell)
    for program, tests in named:
        if program.startswith("examples/") or program.startswith("dev/"):
            if not any(os.path.exists(os.path.join(root, program + end)) for end in ("", ".c", ".sh", ".py")):
                bad.append(f"row {number}: no {program}")
            continue
        path = os.path.join(root, "tests", program + ".c")
        if not os.path.exists(path):
            bad.append(f"row {number}: no tests/{program}.c")
            continue
        there = registered(path)
        wanted = [t for t in tests.split() if t.startswith("test_")]
        if not wanted:
            bad.append(f"row {number}: tests/{program}.c: which test?")
        bad += [f"row {number}: tests/{program}.c has no {t}" for t in wanted if t not in there]
    honest = cell.startswith("not yet") or cell.startswith("n/a")
    if not named and not honest:
        bad.append(f"row {number}: no test, and neither \"not yet\" nor \"n/a\"")
    return bad


def main():
    rows, bad, count = [], [], {"tested": 0, "not yet": 0, "n/a": 0}
    with open(os.path.join(root, "docs", "behaviours.md")) as f:
        for line in f:
            m = re.match(r"\| (\d+) \| (.*) \| (.*) \|$", line)
            if m:
                rows.append((int(m.group(1)), m.group(3)))
    if [r[0] for r in rows] != list(range(1, 60)):
        bad.append("rows are not numbered 1 to 59")
    for number, cell in rows:
        bad += check(number, cell)
        count["not yet" if cell.startswith("not yet") else "n/a" if cell.startswith("n/a") else "tested"] += 1
    print("behaviours: " + ", ".join(f"{n} {what}" for what, n in count.items()))
    for b in bad:
        print("behaviours: " + b)
    return 1 if bad else 0


sys.exit(main())
